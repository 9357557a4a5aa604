#include "textflag.h"

// WORDS gets the slice of words: their address in SI, and the number of vectors in CX.
#define WORDS(offset) \
	MOVQ words+offset(FP), SI;       \
	MOVQ words_len+(offset+8)(FP), CX; \
	SHRQ $2, CX

// NEXT goes on with the next vector, if there is one.
#define NEXT(loop) \
	ADDQ $32, SI; \
	DECQ CX;      \
	JNZ  loop

// func shiftAVX2(to *uint64, words []uint64, before, add, after uint64)
TEXT ·shiftAVX2(SB), NOSPLIT, $0-56
	WORDS(8)
	MOVQ         to+0(FP), DI
	VPBROADCASTQ before+32(FP), Y0
	VPBROADCASTQ add+40(FP), Y1
	VPBROADCASTQ after+48(FP), Y2
loop:
	VPXOR   (SI), Y0, Y3
	VPADDQ  Y1, Y3, Y3
	VPXOR   Y2, Y3, Y3
	VMOVDQU Y3, (DI)
	ADDQ    $32, DI
	NEXT(loop)
	VZEROUPPER
	RET

// func foldAVX2(words []uint64, lower, n uint64)
TEXT ·foldAVX2(SB), NOSPLIT, $0-40
	WORDS(0)
	VPBROADCASTQ lower+24(FP), Y0
	VMOVQ        n+32(FP), X1
loop:
	VMOVDQU (SI), Y2
	VPANDN  Y2, Y0, Y3
	VPSRLQ  X1, Y3, Y3
	VPAND   Y0, Y2, Y2
	VPOR    Y2, Y3, Y3
	VMOVDQU Y3, (SI)
	NEXT(loop)
	VZEROUPPER
	RET

// func unfoldAVX2(words []uint64, lower, upper, n uint64)
TEXT ·unfoldAVX2(SB), NOSPLIT, $0-48
	WORDS(0)
	VPBROADCASTQ lower+24(FP), Y0
	VPBROADCASTQ upper+32(FP), Y1
	VMOVQ        n+40(FP), X2
loop:
	VMOVDQU (SI), Y3
	VPSLLQ  X2, Y3, Y4
	VPAND   Y1, Y4, Y4
	VPAND   Y0, Y3, Y3
	VPOR    Y3, Y4, Y4
	VMOVDQU Y4, (SI)
	NEXT(loop)
	VZEROUPPER
	RET

// func extremesAVX2(smallest, largest *[4]uint64, words []uint64, length uint)
TEXT ·extremesAVX2(SB), NOSPLIT, $0-48
	WORDS(16)
	MOVQ    length+40(FP), AX
	VMOVDQU (SI), Y0 // the smallest
	VMOVDQU Y0, Y1   // the largest
	CMPQ    AX, $16
	JEQ     loop16
	CMPQ    AX, $32
	JEQ     loop32
	CMPQ    AX, $64
	JEQ     loop64
loop8:
	VPMINUB (SI), Y0, Y0
	VPMAXUB (SI), Y1, Y1
	NEXT(loop8)
	JMP     done
loop16:
	VPMINSW (SI), Y0, Y0
	VPMAXSW (SI), Y1, Y1
	NEXT(loop16)
	JMP     done
loop32:
	VPMINSD (SI), Y0, Y0
	VPMAXSD (SI), Y1, Y1
	NEXT(loop32)
	JMP     done
loop64:
	VMOVDQU   (SI), Y2
	VPCMPGTQ  Y2, Y0, Y3
	VBLENDVPD Y3, Y2, Y0, Y0
	VPCMPGTQ  Y1, Y2, Y3
	VBLENDVPD Y3, Y2, Y1, Y1
	NEXT(loop64)
done:
	MOVQ    smallest+0(FP), DI
	VMOVDQU Y0, (DI)
	MOVQ    largest+8(FP), DI
	VMOVDQU Y1, (DI)
	VZEROUPPER
	RET
