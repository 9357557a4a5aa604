#include "textflag.h"

// func Living() uintptr
TEXT ·Living(SB), NOSPLIT, $0-8
	MOVQ (TLS), AX
	MOVQ AX, ret+0(FP)
	RET
