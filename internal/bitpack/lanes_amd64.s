//go:build !race

#include "textflag.h"

// A packed vector has 32 bytes, and lanes of 64, 32 or 16 bits. In these loops
//
//	SI, DI  what is read and written         R8  the bit, of each lane, that comes next
//	CX      vectors that are left            R9  width: bits of a number
//	Y0      of unpack: the mask of a number; of pack: the vector that is not full yet
//	Y3      the numbers of this turn
//
// and shifts by as many bits as a lane has, or more, leave zero.

// The byte offset in AX of the vector that bit R8 is in.
#define AT64 MOVQ R8, AX; SHRQ $1, AX; ANDQ $-32, AX
#define AT32 MOVQ R8, AX; ANDQ $-32, AX
#define AT16 LEAQ (R8)(R8*1), AX; ANDQ $-32, AX

// TAKE gets the next numbers: from one vector, or its upper bits and the next one's lower
// ones. R10 is the offset of the last vector, behind which nothing is read.
#define TAKE(AT, SRL, SLL, BITS) \
	AT;                       \
	LEAQ     32(AX), BX;      \
	CMPQ     BX, R10;         \
	CMOVQGT  R10, BX;         \
	MOVQ     R8, DX;          \
	ANDQ     $(BITS-1), DX;   \
	MOVQ     $BITS, R11;      \
	SUBQ     DX, R11;         \
	VMOVQ    DX, X1;          \
	VMOVQ    R11, X2;         \
	VMOVDQU  (SI)(AX*1), Y3;  \
	VMOVDQU  (SI)(BX*1), Y4;  \
	SRL      X1, Y3, Y3;      \
	SLL      X2, Y4, Y4;      \
	VPOR     Y4, Y3, Y3;      \
	VPAND    Y0, Y3, Y3;      \
	ADDQ     R9, R8

// GIVE puts numbers behind those before. open is a label of its own.
#define GIVE(SRL, SLL, BITS, open) \
	VMOVQ    R8, X1;        \
	SLL      X1, Y3, Y4;    \
	VPOR     Y4, Y0, Y0;    \
	ADDQ     R9, R8;        \
	CMPQ     R8, $BITS;     \
	JLT      open;          \
	SUBQ     $BITS, R8;     \
	MOVQ     R9, R11;       \
	SUBQ     R8, R11;       \
	VMOVQ    R11, X2;       \
	VMOVDQU  Y0, (DI);      \
	ADDQ     $32, DI;       \
	SRL      X2, Y3, Y0;    \
open:

// MASK makes of dst the lowest R9 bits of each lane.
#define MASK(SRL, BITS, dst) \
	MOVQ     $BITS, AX;         \
	SUBQ     R9, AX;            \
	VMOVQ    AX, X1;            \
	VPCMPEQQ dst, dst, dst;     \
	SRL      X1, dst, dst

// MUL multiplies the 64-bit lanes of a by those of b, whose upper halves are bh.
#define MUL(a, b, bh, t, u) \
	VPSRLQ   $32, a, t;   \
	VPMULUDQ b, t, t;     \
	VPMULUDQ bh, a, u;    \
	VPADDQ   t, u, t;     \
	VPSLLQ   $32, t, t;   \
	VPMULUDQ b, a, a;     \
	VPADDQ   t, a, a

#define UNPACKARGS \
	MOVQ dst+0(FP), DI;    \
	MOVQ src+8(FP), SI;    \
	MOVQ n+16(FP), CX;     \
	MOVQ last+24(FP), R10; \
	MOVQ width+32(FP), R9; \
	XORQ R8, R8

#define PUT \
	VMOVDQU Y3, (DI); \
	ADDQ    $32, DI

#define PACKARGS \
	MOVQ  dst+0(FP), DI;    \
	MOVQ  src+8(FP), SI;    \
	MOVQ  n+16(FP), CX;     \
	MOVQ  width+24(FP), R9; \
	XORQ  R8, R8;           \
	VPXOR Y0, Y0, Y0;       \
	VPXOR Y12, Y12, Y12;    \
	VPXOR Y13, Y13, Y13

// PACKED stores what is left and returns whether all numbers had as many bits as Y11 is the mask
// of, and all that was to be divided no remainder, which are in Y12 and Y13.
#define PACKED(none) \
	TESTQ    R8, R8;         \
	JEQ      none;           \
	VMOVDQU  Y0, (DI);       \
none:                       \
	VPANDN   Y12, Y11, Y12;  \
	VPOR     Y13, Y12, Y12;  \
	VPTEST   Y12, Y12;       \
	SETEQ    AX;             \
	VZEROUPPER

// DIVIDE64 divides the words in Y3 by 2^X6 and what Y7 is the inverse of.
#define DIVIDE64 \
	VPAND  Y9, Y3, Y10;   \
	VPOR   Y10, Y13, Y13; \
	VPSRLQ X6, Y3, Y3;    \
	MUL(Y3, Y7, Y8, Y10, Y14)

#define DIVISORARGS(shift, inverse) \
	MOVQ         shift, AX;    \
	VMOVQ        AX, X6;       \
	VPCMPEQQ     Y9, Y9, Y9;   \
	VPSLLQ       X6, Y9, Y9;   \
	VPCMPEQQ     Y10, Y10, Y10; \
	VPXOR        Y10, Y9, Y9;  \
	VPBROADCASTQ inverse, Y7;  \
	VPSRLQ       $32, Y7, Y8

#define RANGEARGS \
	MOVQ out+0(FP), DI; \
	MOVQ src+8(FP), SI; \
	MOVQ n+16(FP), CX

#define RANGED \
	VMOVDQU Y0, (DI);   \
	VMOVDQU Y1, 32(DI); \
	VZEROUPPER;         \
	RET

#define LEAST64 \
	VPCMPGTQ  Y3, Y0, Y4;     \
	VBLENDVPD Y4, Y3, Y0, Y0; \
	VPCMPGTQ  Y1, Y3, Y4;     \
	VBLENDVPD Y4, Y3, Y1, Y1

// func unpackFor64(dst, src *byte, n, last, width, base, by uint64)
TEXT ·unpackFor64(SB), NOSPLIT, $0-56
	UNPACKARGS
	MASK(VPSRLQ, 64, Y0)
	VPBROADCASTQ base+40(FP), Y5
	VPBROADCASTQ by+48(FP), Y6
	VPSRLQ       $32, Y6, Y7
	CMPQ         by+48(FP), $1
	JEQ          plain

multiply:
	TAKE(AT64, VPSRLQ, VPSLLQ, 64)
	MUL(Y3, Y6, Y7, Y8, Y9)
	VPADDQ Y5, Y3, Y3
	PUT
	DECQ   CX
	JNZ    multiply
	VZEROUPPER
	RET

plain:
	TAKE(AT64, VPSRLQ, VPSLLQ, 64)
	VPADDQ Y5, Y3, Y3
	PUT
	DECQ   CX
	JNZ    plain
	VZEROUPPER
	RET

// SUM64 makes of differences in Y3 the numbers, the one before which is in each lane of Y10.
#define SUM64 \
	VPADDQ      Y5, Y3, Y3;        \
	VPSLLDQ     $8, Y3, Y8;        \
	VPADDQ      Y8, Y3, Y3;        \
	VPUNPCKHQDQ Y3, Y3, Y8;        \
	VPERM2I128  $0x08, Y8, Y8, Y8; \
	VPADDQ      Y8, Y3, Y3;        \
	VPERMQ      $0xff, Y3, Y8;     \
	VPADDQ      Y10, Y3, Y3;       \
	VPADDQ      Y8, Y10, Y10

// func unpackDelta64(dst, src *byte, n, last, width, base, by, first uint64)
TEXT ·unpackDelta64(SB), NOSPLIT, $0-64
	UNPACKARGS
	MASK(VPSRLQ, 64, Y0)
	VPBROADCASTQ base+40(FP), Y5
	VPBROADCASTQ by+48(FP), Y6
	VPSRLQ       $32, Y6, Y7
	VPBROADCASTQ first+56(FP), Y10
	CMPQ         by+48(FP), $1
	JEQ          plain

multiply:
	TAKE(AT64, VPSRLQ, VPSLLQ, 64)
	MUL(Y3, Y6, Y7, Y8, Y9)
	SUM64
	PUT
	DECQ CX
	JNZ  multiply
	VZEROUPPER
	RET

plain:
	TAKE(AT64, VPSRLQ, VPSLLQ, 64)
	SUM64
	PUT
	DECQ CX
	JNZ  plain
	VZEROUPPER
	RET

// func unpackFor32(dst, src *byte, n, last, width, base uint64)
TEXT ·unpackFor32(SB), NOSPLIT, $0-48
	UNPACKARGS
	MASK(VPSRLD, 32, Y0)
	VPBROADCASTD base+40(FP), Y5

loop:
	TAKE(AT32, VPSRLD, VPSLLD, 32)
	VPADDD Y5, Y3, Y3
	PUT
	DECQ   CX
	JNZ    loop
	VZEROUPPER
	RET

// func unpackDelta32(dst, src *byte, n, last, width, base, first uint64)
TEXT ·unpackDelta32(SB), NOSPLIT, $0-56
	UNPACKARGS
	MASK(VPSRLD, 32, Y0)
	VPBROADCASTD base+40(FP), Y5
	VPBROADCASTD first+48(FP), Y10

loop:
	TAKE(AT32, VPSRLD, VPSLLD, 32)
	VPADDD     Y5, Y3, Y3
	VPSLLDQ    $4, Y3, Y8
	VPADDD     Y8, Y3, Y3
	VPSLLDQ    $8, Y3, Y8
	VPADDD     Y8, Y3, Y3
	VPSHUFD    $0xff, Y3, Y8
	VPERM2I128 $0x08, Y8, Y8, Y8
	VPADDD     Y8, Y3, Y3
	VPERMQ     $0xff, Y3, Y8
	VPSHUFD    $0xf5, Y8, Y8
	VPADDD     Y10, Y3, Y3
	VPADDD     Y8, Y10, Y10
	PUT
	DECQ       CX
	JNZ        loop
	VZEROUPPER
	RET

// func unpackFor16(dst, src *byte, n, last, width, base uint64)
TEXT ·unpackFor16(SB), NOSPLIT, $0-48
	UNPACKARGS
	MASK(VPSRLW, 16, Y0)
	MOVQ         base+40(FP), AX
	VMOVQ        AX, X5
	VPBROADCASTW X5, Y5

loop:
	TAKE(AT16, VPSRLW, VPSLLW, 16)
	VPADDW Y5, Y3, Y3
	PUT
	DECQ   CX
	JNZ    loop
	VZEROUPPER
	RET

// func unpackFor8(dst, src *byte, n, last, width, base uint64)
//
// Two numbers, of width bits both together, are in a lane of 16 bits.
TEXT ·unpackFor8(SB), NOSPLIT, $0-48
	UNPACKARGS
	MASK(VPSRLW, 16, Y0)
	MOVQ         base+40(FP), AX
	VMOVQ        AX, X5
	VPBROADCASTB X5, Y5
	MOVQ         R9, AX
	SHRQ         $1, AX
	VMOVQ        AX, X7
	VPSRLW       X7, Y0, Y6 // the mask of one

loop:
	TAKE(AT16, VPSRLW, VPSLLW, 16)
	VPSRLW X7, Y3, Y8
	VPAND  Y6, Y3, Y3
	VPSLLW $8, Y8, Y8
	VPOR   Y8, Y3, Y3
	VPADDB Y5, Y3, Y3
	PUT
	DECQ   CX
	JNZ    loop
	VZEROUPPER
	RET

// func packFor64(dst, src *byte, n, width, base, shift, inverse uint64) bool
TEXT ·packFor64(SB), NOSPLIT, $0-57
	PACKARGS
	MASK(VPSRLQ, 64, Y11)
	VPBROADCASTQ base+32(FP), Y5
	DIVISORARGS(shift+40(FP), inverse+48(FP))
	CMPQ         inverse+48(FP), $1
	JNE          divide
	TESTQ        AX, AX
	JEQ          plain

divide:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPSUBQ  Y5, Y3, Y3
	DIVIDE64
	VPOR    Y3, Y12, Y12
	GIVE(VPSRLQ, VPSLLQ, 64, open)
	DECQ    CX
	JNZ     divide
	JMP     done

plain:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPSUBQ  Y5, Y3, Y3
	VPOR    Y3, Y12, Y12
	GIVE(VPSRLQ, VPSLLQ, 64, openPlain)
	DECQ    CX
	JNZ     plain

done:
	PACKED(none)
	MOVB AX, ret+56(FP)
	RET

// func packDelta64(dst, src *byte, n, width, base, shift, inverse, first uint64) bool
TEXT ·packDelta64(SB), NOSPLIT, $0-65
	PACKARGS
	MASK(VPSRLQ, 64, Y11)
	VPBROADCASTQ base+32(FP), Y5
	DIVISORARGS(shift+40(FP), inverse+48(FP))
	VPBROADCASTQ first+56(FP), Y15

loop:
	VMOVDQU  (SI), Y3
	ADDQ     $32, SI
	VPERMQ   $0x90, Y3, Y4
	VPBLENDD $0x03, Y15, Y4, Y4 // the words before
	VPERMQ   $0xff, Y3, Y15
	VPSUBQ   Y4, Y3, Y3
	VPSUBQ   Y5, Y3, Y3
	DIVIDE64
	VPOR     Y3, Y12, Y12
	GIVE(VPSRLQ, VPSLLQ, 64, open)
	DECQ     CX
	JNZ      loop
	PACKED(none)
	MOVB AX, ret+64(FP)
	RET

// func packFor32(dst, src *byte, n, width, base uint64) bool
TEXT ·packFor32(SB), NOSPLIT, $0-41
	PACKARGS
	MASK(VPSRLD, 32, Y11)
	VPBROADCASTD base+32(FP), Y5

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPSUBD  Y5, Y3, Y3
	VPOR    Y3, Y12, Y12
	GIVE(VPSRLD, VPSLLD, 32, open)
	DECQ    CX
	JNZ     loop
	PACKED(none)
	MOVB AX, ret+40(FP)
	RET

DATA before<>+0(SB)/8, $0x0000000000000000
DATA before<>+8(SB)/8, $0x0000000200000001
DATA before<>+16(SB)/8, $0x0000000400000003
DATA before<>+24(SB)/8, $0x0000000600000005
GLOBL before<>(SB), RODATA|NOPTR, $32

// func packDelta32(dst, src *byte, n, width, base, first uint64) bool
TEXT ·packDelta32(SB), NOSPLIT, $0-49
	PACKARGS
	MASK(VPSRLD, 32, Y11)
	VPBROADCASTD base+32(FP), Y5
	VPBROADCASTD first+40(FP), Y15
	VMOVDQU      before<>(SB), Y6

loop:
	VMOVDQU  (SI), Y3
	ADDQ     $32, SI
	VPERMD   Y3, Y6, Y4
	VPBLENDD $0x01, Y15, Y4, Y4 // the words before
	VPERMQ   $0xff, Y3, Y15
	VPSHUFD  $0xf5, Y15, Y15
	VPSUBD   Y4, Y3, Y3
	VPSUBD   Y5, Y3, Y3
	VPOR     Y3, Y12, Y12
	GIVE(VPSRLD, VPSLLD, 32, open)
	DECQ     CX
	JNZ      loop
	PACKED(none)
	MOVB AX, ret+48(FP)
	RET

// func packFor16(dst, src *byte, n, width, base uint64) bool
TEXT ·packFor16(SB), NOSPLIT, $0-41
	PACKARGS
	MASK(VPSRLW, 16, Y11)
	MOVQ         base+32(FP), AX
	VMOVQ        AX, X5
	VPBROADCASTW X5, Y5

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPSUBW  Y5, Y3, Y3
	VPOR    Y3, Y12, Y12
	GIVE(VPSRLW, VPSLLW, 16, open)
	DECQ    CX
	JNZ     loop
	PACKED(none)
	MOVB AX, ret+40(FP)
	RET

// func packFor8(dst, src *byte, n, width, base uint64) bool
//
// width is that of two numbers.
TEXT ·packFor8(SB), NOSPLIT, $0-41
	PACKARGS
	MOVQ         base+32(FP), AX
	VMOVQ        AX, X5
	VPBROADCASTB X5, Y5
	VPCMPEQQ     Y6, Y6, Y6
	VPSRLW       $8, Y6, Y6
	MOVQ         R9, AX
	SHRQ         $1, AX
	VMOVQ        AX, X7
	MOVQ         $8, BX
	SUBQ         AX, BX
	VMOVQ        BX, X1
	VPSRLW       X1, Y6, Y11
	VPSLLW       $8, Y11, Y4
	VPOR         Y4, Y11, Y11 // the mask of a number in each byte

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPSUBB  Y5, Y3, Y3
	VPOR    Y3, Y12, Y12
	VPSRLW  $8, Y3, Y8
	VPAND   Y6, Y3, Y3
	VPSLLW  X7, Y8, Y8
	VPOR    Y8, Y3, Y3
	GIVE(VPSRLW, VPSLLW, 16, open)
	DECQ    CX
	JNZ     loop
	PACKED(none)
	MOVB AX, ret+40(FP)
	RET

// The least and the largest lanes of n vectors, or of the differences between them and those
// that begin step bytes before.

// func range64(out *[2][32]byte, src *byte, n uint64)
TEXT ·range64(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU (SI), Y0
	VMOVDQU (SI), Y1

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	LEAST64
	DECQ    CX
	JNZ     loop
	RANGED

// func rangeDelta64(out *[2][32]byte, src *byte, n uint64)
TEXT ·rangeDelta64(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU 8(SI), Y0
	VPSUBQ  (SI), Y0, Y0
	VMOVDQA Y0, Y1

loop:
	VMOVDQU 8(SI), Y3
	VPSUBQ  (SI), Y3, Y3
	ADDQ    $32, SI
	LEAST64
	DECQ    CX
	JNZ     loop
	RANGED

// func range32(out *[2][32]byte, src *byte, n uint64)
TEXT ·range32(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU (SI), Y0
	VMOVDQU (SI), Y1

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPMINSD Y3, Y0, Y0
	VPMAXSD Y3, Y1, Y1
	DECQ    CX
	JNZ     loop
	RANGED

// func rangeDelta32(out *[2][32]byte, src *byte, n uint64)
TEXT ·rangeDelta32(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU 4(SI), Y0
	VPSUBD  (SI), Y0, Y0
	VMOVDQA Y0, Y1

loop:
	VMOVDQU 4(SI), Y3
	VPSUBD  (SI), Y3, Y3
	ADDQ    $32, SI
	VPMINSD Y3, Y0, Y0
	VPMAXSD Y3, Y1, Y1
	DECQ    CX
	JNZ     loop
	RANGED

// func range16(out *[2][32]byte, src *byte, n uint64)
TEXT ·range16(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU (SI), Y0
	VMOVDQU (SI), Y1

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPMINSW Y3, Y0, Y0
	VPMAXSW Y3, Y1, Y1
	DECQ    CX
	JNZ     loop
	RANGED

// func range8(out *[2][32]byte, src *byte, n uint64)
TEXT ·range8(SB), NOSPLIT, $0-24
	RANGEARGS
	VMOVDQU (SI), Y0
	VMOVDQU (SI), Y1

loop:
	VMOVDQU (SI), Y3
	ADDQ    $32, SI
	VPMINUB Y3, Y0, Y0
	VPMAXUB Y3, Y1, Y1
	DECQ    CX
	JNZ     loop
	RANGED
