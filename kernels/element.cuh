// Elements of a cache, VEC neighbouring channels at a time. Compiled with
//   DTYPE 0 bfloat16, 1 float16, 2 float32;  VEC 1, 2, 4 or 8 channels, at most 16 bytes.
// Everything is IEEE, as kernels/README.md asks: compile with --fmad=false and no fast math.
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define MAX_ABS 65504.0f
#define ELEMENT_BYTES (DTYPE == 2 ? 4 : 2)
#define PER_WORD (DTYPE == 2 ? 1 : 2)
#define WORDS ((VEC + PER_WORD - 1) / PER_WORD)
#define CODE_WORDS ((VEC + 3) / 4)

struct Pack { u32 w[WORDS]; };         // VEC elements as they lie in memory
struct Codes { u32 w[CODE_WORDS]; };   // VEC bytes

template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 T; };
template <> struct Bits<2> { typedef u16 T; };
template <> struct Bits<4> { typedef u32 T; };
template <> struct Bits<8> { typedef uint2 T; };
template <> struct Bits<16> { typedef uint4 T; };

// Copies as one access of BYTES bytes; the address is a multiple of that.
template <int BYTES, typename To> DEVICE To load_as(const void* at) {
    To out = {};
    typedef typename Bits<BYTES>::T T;
    *reinterpret_cast<T*>(&out) = *reinterpret_cast<const T*>(at);
    return out;
}
template <int BYTES, typename From> DEVICE void store_as(void* at, const From& value) {
    typedef typename Bits<BYTES>::T T;
    *reinterpret_cast<T*>(at) = *reinterpret_cast<const T*>(&value);
}

// The same where `really`; as a predicate, not a branch that what led to the value would move into.
template <int BYTES, typename From> DEVICE void store_if(bool really, void* at, const From& value) {
    typedef typename Bits<BYTES>::T T;
    const T x = *reinterpret_cast<const T*>(&value);
    const u32* w = reinterpret_cast<const u32*>(&x);
    if constexpr (BYTES == 16)
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"((int)really), "l"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }" ::"r"((int)really), "l"(at), "r"(w[0]), "r"(w[1]) : "memory");
    else if constexpr (BYTES == 4)
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b32 [%1], %2; }" ::"r"((int)really), "l"(at), "r"(x) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.b16 [%1], %2; }" ::"r"((int)really), "l"(at), "h"((u16)x) : "memory");
}
// Values that loops need: kept in registers, where the compiler would rather compute them again.
DEVICE void keep(u32& x) { asm("" : "+r"(x)); }
DEVICE void keep(float& x) { asm("" : "+f"(x)); }
// (x & mask) | more, as one instruction.
DEVICE u32 masked(u32 x, u32 mask, u32 more) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(x), "r"(mask), "r"(more));
    return out;
}

DEVICE Pack load_pack(const u8* at) { return load_as<VEC * ELEMENT_BYTES, Pack>(at); }
DEVICE void store_pack(u8* at, const Pack& x) { store_as<VEC * ELEMENT_BYTES>(at, x); }
DEVICE Codes load_codes(const u8* at) { return load_as<VEC, Codes>(at); }
DEVICE void store_codes(u8* at, const Codes& x) { store_as<VEC>(at, x); }

DEVICE float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
DEVICE u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
DEVICE u32 two_halves(float low, float high) {
    u32 w;
#if DTYPE == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#endif
    return w;
}
#if DTYPE == 0
#define INFINITY_WORD 0x7F807F80u
#define SIGN_WORD 0x80008000u
#elif DTYPE == 1
#define INFINITY_WORD 0x7C007C00u
#define SIGN_WORD 0x80008000u
#else
#define INFINITY_WORD 0x7F800000u
#define SIGN_WORD 0x80000000u
#endif

// The smaller and the larger of two words' elements; NaN when one is NaN.
DEVICE u32 smaller(u32 a, u32 b) {
    u32 w;
#if DTYPE == 0
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#elif DTYPE == 1
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#else
    asm("{ .reg .f32 x, y; mov.b32 x, %1; mov.b32 y, %2; min.NaN.f32 x, x, y; mov.b32 %0, x; }"
        : "=r"(w) : "r"(a), "r"(b));
#endif
    return w;
}
DEVICE u32 larger(u32 a, u32 b) {
    u32 w;
#if DTYPE == 0
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#elif DTYPE == 1
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#else
    asm("{ .reg .f32 x, y; mov.b32 x, %1; mov.b32 y, %2; max.NaN.f32 x, x, y; mov.b32 %0, x; }"
        : "=r"(w) : "r"(a), "r"(b));
#endif
    return w;
}
// The larger of two words' elements in size, of either sign; NaN when one is NaN.
DEVICE u32 larger_size(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
    u32 w;
#if DTYPE == 0
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#elif DTYPE == 1
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
#else
    asm("{ .reg .f32 x, y; mov.b32 x, %1; mov.b32 y, %2; max.NaN.xorsign.abs.f32 x, x, y; mov.b32 %0, x; }"
        : "=r"(w) : "r"(a), "r"(b));
#endif
    return w;
#else
    return larger(a & ~SIGN_WORD, b & ~SIGN_WORD);
#endif
}
// x / y, correctly rounded.
DEVICE float divide(float x, float y) { return __fdiv_rn(x, y); }

// One element, from its bits.
DEVICE float element(u32 bits) {
#if DTYPE == 0
    return __uint_as_float(bits << 16);
#elif DTYPE == 1
    return half_to_float((u16)bits);
#else
    return __uint_as_float(bits);
#endif
}
DEVICE u32 element_bits(const Pack& x, int v) {
    return PER_WORD == 1 ? x.w[v] : (x.w[v / 2] >> (16 * (v & 1))) & 0xFFFFu;
}
DEVICE float get(const Pack& x, int v) {
#if DTYPE == 0
    return __uint_as_float(v & 1 ? x.w[v / 2] & 0xFFFF0000u : x.w[v / 2] << 16);
#else
    return element(element_bits(x, v));
#endif
}
// VEC floats, rounded half to even.
DEVICE Pack to_pack(const float (&x)[VEC]) {
    Pack out = {};
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#if DTYPE == 2
        out.w[i] = __float_as_uint(x[i]);
#else
        out.w[i] = two_halves(x[2 * i], VEC == 1 ? 0.0f : x[VEC == 1 ? 0 : 2 * i + 1]);
#endif
    }
    return out;
}

// Bits of the largest float16 <= x and of the smallest >= x; zero is +0.
DEVICE u16 half_down(float x) {
    u16 h = float_to_half(x);
    if (half_to_float(h) > x) h = (h & 0x7FFF) == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1;
    return h == 0x8000 ? 0 : h;
}
DEVICE u16 half_up(float x) {
    u16 h = float_to_half(x);
    if (half_to_float(h) < x) h = (h & 0x7FFF) == 0 ? 0x0001 : h & 0x8000 ? h - 1 : h + 1;
    return h == 0x8000 ? 0 : h;
}

// -- bytes -----------------------------------------------------------------------------------------

DEVICE u32 in_each_byte(u32 value) { return value * 0x01010101u; }
// Byte v of a word as a float.
DEVICE float byte_to_float(u32 word, int v) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650 + v)) - 8388608.0f;
}
// The lowest bytes of four words.
DEVICE u32 join_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Eight tokens' codes of BITS bits as BITS byte rows, and back: see "bit plane" in README.md.
template <int BITS> DEVICE void pack_rows(const u32 (&codes)[8], u32 (&rows)[BITS ? BITS : 1]) {
#pragma unroll
    for (int r = 0; r < BITS; ++r) rows[r] = 0;
#pragma unroll
    for (int i = 0; i < (BITS ? 8 : 0); ++i) {
        const int row = i * BITS / 8, shift = i * BITS % 8;
        rows[row] |= (codes[i] << shift) & in_each_byte((((1u << BITS) - 1) << shift) & 0xFF);
        if (shift + BITS > 8)
            rows[row + 1] |= (codes[i] >> (8 - shift)) &
                             in_each_byte(((1u << BITS) - 1) >> (8 - shift));
    }
}
template <int BITS> DEVICE u32 unpack_row(const u32 (&rows)[BITS ? BITS : 1], int i) {
    if (BITS == 0) return 0;
    const int row = i * BITS / 8, shift = i * BITS % 8;
    const u32 mask = (1u << BITS) - 1;
    u32 code = (rows[row] >> shift) & in_each_byte(mask & (0xFFu >> shift));
    if (shift + BITS > 8)
        code |= (rows[row + 1] << (8 - shift)) & in_each_byte(mask & (0xFFu << (8 - shift)) & 0xFF);
    return code;
}
