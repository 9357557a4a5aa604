#include "textflag.h"

// The first 192 bytes of XXH3's default secret.
DATA secret<>+0(SB)/8, $0xbe4ba423396cfeb8
DATA secret<>+8(SB)/8, $0x1cad21f72c81017c
DATA secret<>+16(SB)/8, $0xdb979083e96dd4de
DATA secret<>+24(SB)/8, $0x1f67b3b7a4a44072
DATA secret<>+32(SB)/8, $0x78e5c0cc4ee679cb
DATA secret<>+40(SB)/8, $0x2172ffcc7dd05a82
DATA secret<>+48(SB)/8, $0x8e2443f7744608b8
DATA secret<>+56(SB)/8, $0x4c263a81e69035e0
DATA secret<>+64(SB)/8, $0xcb00c391bb52283c
DATA secret<>+72(SB)/8, $0xa32e531b8b65d088
DATA secret<>+80(SB)/8, $0x4ef90da297486471
DATA secret<>+88(SB)/8, $0xd8acdea946ef1938
DATA secret<>+96(SB)/8, $0x3f349ce33f76faa8
DATA secret<>+104(SB)/8, $0x1d4f0bc7c7bbdcf9
DATA secret<>+112(SB)/8, $0x3159b4cd4be0518a
DATA secret<>+120(SB)/8, $0x647378d9c97e9fc8
DATA secret<>+128(SB)/8, $0xc3ebd33483acc5ea
DATA secret<>+136(SB)/8, $0xeb6313faffa081c5
DATA secret<>+144(SB)/8, $0x49daf0b751dd0d17
DATA secret<>+152(SB)/8, $0x9e68d429265516d3
DATA secret<>+160(SB)/8, $0xfca1477d58be162b
DATA secret<>+168(SB)/8, $0xce31d07ad1b8f88f
DATA secret<>+176(SB)/8, $0x280416958f3acb45
DATA secret<>+184(SB)/8, $0x7e404bbbcafbd7af
GLOBL secret<>(SB), RODATA|NOPTR, $192

DATA prime<>+0(SB)/8, $0x000000009e3779b1
DATA prime<>+8(SB)/8, $0x000000009e3779b1
DATA prime<>+16(SB)/8, $0x000000009e3779b1
DATA prime<>+24(SB)/8, $0x000000009e3779b1
GLOBL prime<>(SB), RODATA|NOPTR, $32

// HALF takes 32 bytes of a stripe: it subtracts Y3 as SUB does, stores them with
// ST, and adds to acc, lane by lane, the neighbour's word, and the product of the
// two halves of the word xor the key.
#define HALF(ST, SUB, off, key, acc, d, k, p) \
	VMOVDQU  off(SI), d;    \
	SUB(d)                  \
	VPXOR    key(DX), d, k; \
	ST       d, off(DI);    \
	VPSHUFD  $0x31, k, p;   \
	VPMULUDQ k, p, k;       \
	VPSHUFD  $0x4e, d, d;   \
	VPADDQ   acc, d, acc;   \
	VPADDQ   acc, k, acc

#define NOSUB(d)
#define SUB32(d) VPSUBD Y3, d, d;
#define SUB64(d) VPSUBQ Y3, d, d;

#define STRIPE(ST, SUB, n) \
	HALF(ST, SUB, (64*n), (8*n), Y0, Y4, Y5, Y6);     \
	HALF(ST, SUB, (64*n+32), (8*n+32), Y1, Y7, Y8, Y9)

// PAIR takes two stripes. 448 bytes ahead measured best of 448, 1024, 2048,
// 4096 and nothing.
#define PAIR(ST, SUB, n) \
	PREFETCHNTA (448+64*n)(SI); \
	PREFETCHNTA (512+64*n)(SI); \
	STRIPE(ST, SUB, n);         \
	STRIPE(ST, SUB, (n+1))

// SCRAMBLE mixes a half of the state after a block.
#define SCRAMBLE(key, acc) \
	VPSRLQ   $47, acc, Y4;    \
	VPXOR    Y4, acc, Y4;     \
	VPXOR    key(DX), Y4, Y4; \
	VPSRLQ   $32, Y4, Y5;     \
	VPMULUDQ Y2, Y4, Y4;      \
	VPMULUDQ Y2, Y5, Y5;      \
	VPSLLQ   $32, Y5, Y5;     \
	VPADDQ   Y4, Y5, acc

#define BLOCK(ST, SUB) \
	PAIR(ST, SUB, 0);   \
	PAIR(ST, SUB, 2);   \
	PAIR(ST, SUB, 4);   \
	PAIR(ST, SUB, 6);   \
	PAIR(ST, SUB, 8);   \
	PAIR(ST, SUB, 10);  \
	PAIR(ST, SUB, 12);  \
	PAIR(ST, SUB, 14);  \
	SCRAMBLE(128, Y0);  \
	SCRAMBLE(160, Y1);  \
	ADDQ     $1024, SI; \
	ADDQ     $1024, DI; \
	DECQ     CX

// LAST takes a run's last block: its last stripe has a key of its own, and the state is
// not mixed after it.
#define LAST(ST, SUB) \
	PAIR(ST, SUB, 0);   \
	PAIR(ST, SUB, 2);   \
	PAIR(ST, SUB, 4);   \
	PAIR(ST, SUB, 6);   \
	PAIR(ST, SUB, 8);   \
	PAIR(ST, SUB, 10);  \
	PAIR(ST, SUB, 12);  \
	STRIPE(ST, SUB, 14); \
	HALF(ST, SUB, 960, 121, Y0, Y4, Y5, Y6); \
	HALF(ST, SUB, 992, 153, Y1, Y7, Y8, Y9)

// LOOPS copies CX blocks, and then the last one if R9 is not 0; past the cache if the
// destination takes such stores, which must be aligned. They are not ordered with those of
// other kinds until there is a fence.
#define LOOPS(SUB) \
	TESTQ   $31, DI;         \
	JNZ     cached;          \
	TESTQ   CX, CX;          \
	JZ      streamedlast;    \
streamed:                    \
	BLOCK(VMOVNTDQ, SUB);    \
	JNZ     streamed;        \
streamedlast:                \
	TESTQ   R9, R9;          \
	JZ      done;            \
	LAST(VMOVNTDQ, SUB);     \
	JMP     done;            \
cached:                      \
	TESTQ   CX, CX;          \
	JZ      cachedlast;      \
next:                        \
	BLOCK(VMOVDQU, SUB);     \
	JNZ     next;            \
cachedlast:                  \
	TESTQ   R9, R9;          \
	JZ      done;            \
	LAST(VMOVDQU, SUB);      \
done:                        \
	VMOVDQU Y0, (AX);        \
	VMOVDQU Y1, 32(AX);      \
	VZEROUPPER;              \
	RET

#define ARGS \
	MOVQ    acc+0(FP), AX;      \
	MOVQ    dst+8(FP), DI;      \
	MOVQ    src+16(FP), SI;     \
	MOVQ    blocks+24(FP), CX;  \
	MOVQ    last+32(FP), R9;    \
	LEAQ    secret<>(SB), DX;   \
	VMOVDQU (AX), Y0;           \
	VMOVDQU 32(AX), Y1;         \
	VMOVDQU prime<>(SB), Y2

// func copyBlocks(acc *[8]uint64, dst, src *byte, blocks, last uint64)
TEXT ·copyBlocks(SB), NOSPLIT, $0-40
	ARGS
	LOOPS(NOSUB)

// func copyBlocksSub32(acc *[8]uint64, dst, src *byte, blocks, last uint64, base uint32)
TEXT ·copyBlocksSub32(SB), NOSPLIT, $0-44
	ARGS
	MOVL         base+40(FP), R8
	VMOVD        R8, X3
	VPBROADCASTD X3, Y3
	LOOPS(SUB32)

// func copyBlocksSub64(acc *[8]uint64, dst, src *byte, blocks, last uint64, base uint64)
TEXT ·copyBlocksSub64(SB), NOSPLIT, $0-48
	ARGS
	MOVQ         base+40(FP), R8
	VMOVQ        R8, X3
	VPBROADCASTQ X3, Y3
	LOOPS(SUB64)

// func Fence()
TEXT ·Fence(SB), NOSPLIT, $0-0
	SFENCE
	RET
