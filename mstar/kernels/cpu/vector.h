// Vectors of floats and the conversions every kernel shares. GCC and clang vector extensions: the same source becomes
// AVX-512, AVX2 or NEON; only the bf16 dot product and the transpose name instructions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace mstar {

// One vector register of floats. NR of them are the columns a matrix kernel keeps in registers per row, sized so that
// MR rows of accumulators fit the architecture's registers.
#if defined(__AVX512F__)
constexpr int VW = 16, NR = 4;
#elif defined(__AVX__)
constexpr int VW = 8, NR = 2;
#else
constexpr int VW = 4, NR = 4;
#endif
constexpr int MR = 6;

typedef float vf __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));

struct bf16 {
    uint16_t bits;
};

template <class V> inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof(V)); }

inline vf splat(float x) { return x - vf{}; }
inline vu splat(uint32_t x) { return x - vu{}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Round to nearest even; a NaN stays a NaN.
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

inline vf load_vector(const float* p) { return load<vf>(p); }
inline vf load_vector(const bf16* p) {
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#else
    return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16);
#endif
}
inline void store_vector(float* p, vf v) { store(p, v); }
inline void store_vector(bf16* p, vf v) {
#ifdef __AVX512BF16__
    store(p, _mm512_cvtneps_pbh((__m512)v));
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    store(p, __builtin_convertvector((bits & 0x7fffffff) > splat(0x7f800000u) ? nan : rounded, vh));
#endif
}

template <class T> inline T rounded_to(float x) {
    T y;
    from_float(x, y);
    return y;
}

// Reductions fold halves onto each other: a short chain, and one fixed order.
template <class V, class Op> inline float fold(V v, Op op) {
    constexpr int n = sizeof(V) / 4;
    if constexpr (n == 1) {
        return v[0];
    } else {
        typedef float half __attribute__((vector_size(sizeof(V) / 2)));
        half low, high;
        std::memcpy(&low, &v, sizeof(half));
        std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(half), sizeof(half));
        return fold(op(low, high), op);
    }
}
inline float sum(vf v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}
inline float largest(vf v) {  // ignores a NaN on the left, so callers look for NaN themselves
    return fold(v, [](auto a, auto b) { return b > a ? b : a; });
}

// exp(x) to about 2 units in the last place, exp(88) above that; 0 below -87, NaN stays NaN.
// Cody-Waite reduction x = n ln2 + r and a degree-6 polynomial on |r| <= ln2 / 2.
inline vf exp(vf x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    x = x > splat(88.0f) ? splat(88.0f) : x;
    vf shifted = x * 1.44269504f + shift;
    vf n = shifted - shift;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf y = p * r * r + r + 1.0f;
    vf scaled = (vf)((vu)y + ((vu)shifted << 23));
    return x < splat(-87.0f) ? vf{} : x != x ? x : scaled;
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// One 32-bit word of a packed operand: a float, or two neighbouring bf16 values (the first in the low half).
template <class T> constexpr int WORD = 4 / int(sizeof(T));

// acc + w · a, lane by lane, for words w of a packed operand and one word a in every lane.
template <class T> inline vf dot(vf acc, vu w, vu a);
template <> inline vf dot<float>(vf acc, vu w, vu a) { return acc + (vf)w * (vf)a; }
template <> inline vf dot<bf16>(vf acc, vu w, vu a) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
    acc = acc + (vf)(w << 16) * (vf)(a << 16);
    return acc + (vf)(w & 0xffff0000u) * (vf)(a & 0xffff0000u);
#endif
}

}  // namespace mstar

// Every exported kernel takes one array of 8-byte words, pointers and integers as int64 and reals as double, so that a
// call from Python is one packed buffer, and returns OK or what was wrong with the values it read.
union Arg {
    int64_t i;
    double d;
    void* p;
    template <class T> T* as() const { return static_cast<T*>(p); }
};
enum Status : int { OK = 0, BAD_POSITION, BAD_SLOT, BAD_PAGE, BAD_LENGTH, BAD_TOKEN, BAD_STATE_SLOT, BAD_EXPERT };
#define KERNEL(name) extern "C" __attribute__((visibility("default"))) int name(const Arg* arg)
