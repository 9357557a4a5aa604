#include "textflag.h"

// func Living() uintptr
TEXT ·living(SB), NOSPLIT, $0-8
	MOVQ (TLS), AX
	MOVQ AX, ret+0(FP)
	RET
