// AVX-512 and AMX in software, for tests on CPUs without them.
//
// The target _core_emulated (option TRIVET_EMULATE) compiles avx512.cpp and amx.cpp for AVX2 with
// this folder first on the include path, so that their <immintrin.h> is this file. The compiler's
// own vector types stand in for the registers; each intrinsic below replaces the compiler's by a
// macro of the same name. Arithmetic keeps the rounding and flushing of MXCSR, as the instructions
// do (TDPBF16PS always flushes: the contract sets MXCSR to the same). Tile shapes that would fault
// on a CPU abort.
//
// An intrinsic that is missing here stops the build of _core_emulated ("target specific option
// mismatch"); write it in the section it belongs to.
#pragma once
#include_next <immintrin.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace trivet_emulation {

#define EMULATED static inline __attribute__((always_inline, unused))

typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int Ints __attribute__((vector_size(64)));
typedef unsigned int Uints __attribute__((vector_size(64)));
typedef long long Longs __attribute__((vector_size(64)));
typedef unsigned long long Ulongs __attribute__((vector_size(64)));
typedef short Shorts __attribute__((vector_size(64)));
typedef signed char Chars __attribute__((vector_size(64)));

// ---- halves ----

EMULATED __m256 low(__m512 v) {
    __m256 half;
    std::memcpy(&half, &v, 32);
    return half;
}
EMULATED __m256 high(__m512 v) {
    __m256 half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32, 32);
    return half;
}
EMULATED __m256i low(__m512i v) {
    __m256i half;
    std::memcpy(&half, &v, 32);
    return half;
}
EMULATED __m256i high(__m512i v) {
    __m256i half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32, 32);
    return half;
}
EMULATED __m256d low(__m512d v) {
    __m256d half;
    std::memcpy(&half, &v, 32);
    return half;
}
EMULATED __m256d high(__m512d v) {
    __m256d half;
    std::memcpy(&half, reinterpret_cast<const char*>(&v) + 32, 32);
    return half;
}
EMULATED __m512 join(__m256 a, __m256 b) {
    __m512 v;
    std::memcpy(&v, &a, 32);
    std::memcpy(reinterpret_cast<char*>(&v) + 32, &b, 32);
    return v;
}
EMULATED __m512i join(__m256i a, __m256i b) {
    __m512i v;
    std::memcpy(&v, &a, 32);
    std::memcpy(reinterpret_cast<char*>(&v) + 32, &b, 32);
    return v;
}
EMULATED __m512d join(__m256d a, __m256d b) {
    __m512d v;
    std::memcpy(&v, &a, 32);
    std::memcpy(reinterpret_cast<char*>(&v) + 32, &b, 32);
    return v;
}

// ---- load, store, set, cast ----

template <class T>
EMULATED T load(const void* p) {
    T v;
    std::memcpy(&v, p, 64);
    return v;
}
template <class T>
EMULATED void store(void* p, T v) {
    std::memcpy(p, &v, 64);
}
template <class To, class From>
EMULATED To cast(From v) {
    To out;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&out, &v, sizeof(To));
    return out;
}
// Not a sum with zero, which would lose the sign of -0.
EMULATED __m512 set1_ps(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
EMULATED __m512d set1_pd(double x) { return Doubles{x, x, x, x, x, x, x, x}; }
EMULATED __m512i set1_epi32(int x) { return (__m512i)(Ints{} + x); }
EMULATED __m512i set1_epi64(long long x) { return (__m512i)(Longs{} + x); }
EMULATED __m512i set1_epi16(short x) { return (__m512i)(Shorts{} + x); }
EMULATED __m512i set1_epi8(char x) { return (__m512i)(Chars{} + (signed char)x); }
template <class... Lanes>
EMULATED __m512i setr_epi32(Lanes... lanes) {
    return (__m512i)Ints{lanes...};
}
template <class... Lanes>
EMULATED __m512 setr_ps(Lanes... lanes) {
    return Floats{lanes...};
}

// ---- masks: T is a lane, Count its number ----

template <class T, int Count, class Vector>
EMULATED Vector blend(unsigned long long mask, Vector zero, Vector one) {
    T a[Count], b[Count];
    std::memcpy(a, &zero, sizeof a);
    std::memcpy(b, &one, sizeof b);
    for (int i = 0; i < Count; ++i) a[i] = mask >> i & 1 ? b[i] : a[i];
    std::memcpy(&zero, a, sizeof a);
    return zero;
}
template <class T, int Count, class Vector>
EMULATED Vector mask_load(Vector source, unsigned long long mask, const void* p) {
    T lanes[Count];
    std::memcpy(lanes, &source, sizeof lanes);
    for (int i = 0; i < Count; ++i) {
        if (mask >> i & 1) std::memcpy(lanes + i, static_cast<const T*>(p) + i, sizeof(T));
    }
    std::memcpy(&source, lanes, sizeof lanes);
    return source;
}
template <class T, int Count, class Vector>
EMULATED void mask_store(void* p, unsigned long long mask, Vector v) {
    T lanes[Count];
    std::memcpy(lanes, &v, sizeof lanes);
    for (int i = 0; i < Count; ++i) {
        if (mask >> i & 1) std::memcpy(static_cast<T*>(p) + i, lanes + i, sizeof(T));
    }
}
// Bit i: the sign of lane i of a comparison's result.
EMULATED __mmask16 to_mask(Ints v) {
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= (v[i] ? 1u : 0u) << i;
    return static_cast<__mmask16>(mask);
}
EMULATED __mmask8 to_mask(Longs v) {
    unsigned mask = 0;
    for (int i = 0; i < 8; ++i) mask |= (v[i] ? 1u : 0u) << i;
    return static_cast<__mmask8>(mask);
}
template <int Predicate>
EMULATED __mmask16 cmp_ps(__m512 a, __m512 b) {
    const int bits = _mm256_movemask_ps(_mm256_cmp_ps(low(a), low(b), Predicate)) |
                     _mm256_movemask_ps(_mm256_cmp_ps(high(a), high(b), Predicate)) << 8;
    return static_cast<__mmask16>(bits);
}
template <int Predicate>
EMULATED __mmask8 cmp_pd(__m512d a, __m512d b) {
    const int bits = _mm256_movemask_pd(_mm256_cmp_pd(low(a), low(b), Predicate)) |
                     _mm256_movemask_pd(_mm256_cmp_pd(high(a), high(b), Predicate)) << 4;
    return static_cast<__mmask8>(bits);
}

// ---- conversions and permutations ----

EMULATED __m512 cvtph_ps(__m256i v) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}
EMULATED __m512d cvtps_pd(__m256 v) {
    return join(_mm256_cvtps_pd(_mm256_castps256_ps128(v)),
                _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
}
EMULATED __m256 cvtpd_ps(__m512d v) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low(v))),
                                _mm256_cvtpd_ps(high(v)), 1);
}
EMULATED __m512i cvtepu8_epi32(__m128i v) {
    return join(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
}
EMULATED __m512i cvtepi8_epi32(__m128i v) {
    return join(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}
EMULATED __m512i cvtepu16_epi32(__m256i v) {
    return join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}
EMULATED __m512i cvtepi8_epi16(__m256i v) {
    return join(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(v)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256(v, 1)));
}
EMULATED __m256i cvtepi32_epi16(__m512i v) {
    short lanes[16];
    const Ints ints = (Ints)v;
    for (int i = 0; i < 16; ++i) lanes[i] = static_cast<short>(ints[i]);
    __m256i out;
    std::memcpy(&out, lanes, 32);
    return out;
}
EMULATED __m128i cvtepi32_epi8(__m512i v) {
    signed char lanes[16];
    const Ints ints = (Ints)v;
    for (int i = 0; i < 16; ++i) lanes[i] = static_cast<signed char>(ints[i]);
    __m128i out;
    std::memcpy(&out, lanes, 16);
    return out;
}
EMULATED __m512i permutexvar_epi32(__m512i index, __m512i v) {
    return (__m512i)__builtin_shuffle((Ints)v, (Ints)index);
}
template <int Control>
EMULATED __m512 permute_ps(__m512 v) {
    return join(_mm256_permute_ps(low(v), Control), _mm256_permute_ps(high(v), Control));
}
template <int Control>
EMULATED __m512i shuffle_epi32(__m512i v) {
    return join(_mm256_shuffle_epi32(low(v), Control), _mm256_shuffle_epi32(high(v), Control));
}
// Moves 128-bit quarters: two bits of Control each, two from a and two from b.
template <int Control>
EMULATED __m512 shuffle_f32x4(__m512 a, __m512 b) {
    float from_a[16], from_b[16], out[16];
    std::memcpy(from_a, &a, 64);
    std::memcpy(from_b, &b, 64);
    for (int quarter = 0; quarter < 4; ++quarter) {
        const float* from = (quarter < 2 ? from_a : from_b) + 4 * (Control >> 2 * quarter & 3);
        std::memcpy(out + 4 * quarter, from, 16);
    }
    std::memcpy(&a, out, 64);
    return a;
}

// ---- arithmetic without a vector operator ----

EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fmadd_ps(low(a), low(b), low(c)),
                _mm256_fmadd_ps(high(a), high(b), high(c)));
}
EMULATED __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fnmadd_ps(low(a), low(b), low(c)),
                _mm256_fnmadd_ps(high(a), high(b), high(c)));
}
EMULATED __m512 max_ps(__m512 a, __m512 b) {
    return join(_mm256_max_ps(low(a), low(b)), _mm256_max_ps(high(a), high(b)));
}
EMULATED __m512 min_ps(__m512 a, __m512 b) {
    return join(_mm256_min_ps(low(a), low(b)), _mm256_min_ps(high(a), high(b)));
}
EMULATED __m512 sqrt_ps(__m512 v) { return join(_mm256_sqrt_ps(low(v)), _mm256_sqrt_ps(high(v))); }
EMULATED __m512i cvtps_epi32(__m512 v) {
    return join(_mm256_cvtps_epi32(low(v)), _mm256_cvtps_epi32(high(v)));
}
EMULATED __m512 cvtepi32_ps(__m512i v) {
    return join(_mm256_cvtepi32_ps(low(v)), _mm256_cvtepi32_ps(high(v)));
}
EMULATED __m512i max_epu32(__m512i a, __m512i b) {
    return join(_mm256_max_epu32(low(a), low(b)), _mm256_max_epu32(high(a), high(b)));
}
EMULATED __m512i max_epi32(__m512i a, __m512i b) {
    return join(_mm256_max_epi32(low(a), low(b)), _mm256_max_epi32(high(a), high(b)));
}
EMULATED __m512i min_epi32(__m512i a, __m512i b) {
    return join(_mm256_min_epi32(low(a), low(b)), _mm256_min_epi32(high(a), high(b)));
}
EMULATED __m512i mul_epu32(__m512i a, __m512i b) {
    return join(_mm256_mul_epu32(low(a), low(b)), _mm256_mul_epu32(high(a), high(b)));
}
EMULATED __m512i madd_epi16(__m512i a, __m512i b) {
    return join(_mm256_madd_epi16(low(a), low(b)), _mm256_madd_epi16(high(a), high(b)));
}
EMULATED __m512i abs_epi8(__m512i v) {
    return join(_mm256_abs_epi8(low(v)), _mm256_abs_epi8(high(v)));
}
EMULATED int reduce_add_epi32(__m512i v) {
    const Ints lanes = (Ints)v;
    int sum = 0;
    for (int i = 0; i < 16; ++i) sum += lanes[i];
    return sum;
}
EMULATED unsigned reduce_max_epu32(__m512i v) {
    const Uints lanes = (Uints)v;
    unsigned largest = 0;
    for (int i = 0; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}
// Halves first, like the compiler's sequence.
EMULATED float reduce_max_ps(__m512 v) {
    const __m256 a = _mm256_max_ps(high(v), low(v));
    const __m128 b = _mm_max_ps(_mm256_extractf128_ps(a, 1), _mm256_castps256_ps128(a));
    const __m128 c = _mm_max_ps(b, _mm_shuffle_ps(b, b, 0x4e));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 0xb1)));
}
// Four products of an unsigned and a signed byte per lane, added to an int32 without saturation.
EMULATED __m512i dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
    unsigned char left[64];
    signed char right[64];
    Ints sums = (Ints)acc;
    std::memcpy(left, &a, 64);
    std::memcpy(right, &b, 64);
    for (int i = 0; i < 64; ++i) sums[i / 4] += left[i] * right[i];
    return (__m512i)sums;
}

// ---- AMX ----

struct alignas(64) TileConfig {
    unsigned char palette, start_row, reserved[14];
    unsigned short colsb[16];
    unsigned char rows[16];
};
struct Tiles {
    TileConfig config{};
    unsigned char data[8][16][64];
};
inline thread_local Tiles tiles;

EMULATED void fault(const char* what) {
    std::fprintf(stderr, "emulated AMX fault: %s\n", what);
    std::abort();
}
EMULATED void check_tile(int tile) {
    if (tiles.config.palette != 1) fault("tiles are not configured");
    if (tiles.config.rows[tile] == 0 || tiles.config.colsb[tile] == 0) fault("tile has no shape");
}
static inline void tile_loadconfig(const void* config) {
    std::memcpy(&tiles.config, config, 64);
    if (tiles.config.palette != 1) fault("palette is not 1");
    for (int i = 0; i < 8; ++i) {
        if (tiles.config.rows[i] > 16 || tiles.config.colsb[i] > 64) fault("tile is too large");
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
}
static inline void tile_release() { tiles.config = TileConfig{}; }
static inline void tile_zero(int tile) {
    check_tile(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
static inline void tile_load(int tile, const void* base, long stride) {
    tile_zero(tile);
    for (int r = 0; r < tiles.config.rows[tile]; ++r) {
        std::memcpy(tiles.data[tile][r], static_cast<const char*>(base) + r * stride,
                    tiles.config.colsb[tile]);
    }
}
static inline void tile_store(int tile, void* base, long stride) {
    check_tile(tile);
    for (int r = 0; r < tiles.config.rows[tile]; ++r) {
        std::memcpy(static_cast<char*>(base) + r * stride, tiles.data[tile][r],
                    tiles.config.colsb[tile]);
    }
}
static inline void check_product(int c, int a, int b) {
    check_tile(a);
    check_tile(b);
    check_tile(c);
    const TileConfig& t = tiles.config;
    if (c == a || c == b || a == b) fault("tiles of a product are not distinct");
    if (t.rows[c] != t.rows[a] || t.colsb[c] != t.colsb[b] || t.colsb[a] != 4 * t.rows[b]) {
        fault("tile shapes do not match");
    }
}
// Products run over all 16 channels of a row at once; lanes beyond colsb are zero and not stored.
// A and B are signed char or unsigned char.
template <class A, class B>
inline void tile_dpb(int c, int a, int b) {
    check_product(c, a, b);
    for (int m = 0; m < tiles.config.rows[c]; ++m) {
        Ints sum = load<Ints>(tiles.data[c][m]);
        for (int k = 0; k < tiles.config.colsb[a]; ++k) {
            const int left = static_cast<A>(tiles.data[a][m][k]);
            const Uints top = load<Uints>(tiles.data[b][k / 4]) << (24 - 8 * (k % 4));
            const Ints right = static_cast<B>(-1) < 0 ? (Ints)top >> 24 : (Ints)(top >> 24);
            sum += left * right;
        }
        store<Ints>(tiles.data[c][m], sum);
    }
}
EMULATED float widen(const unsigned char* bf16) {
    const unsigned bits = static_cast<unsigned>(bf16[0] | bf16[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline void tile_dpbf16ps(int c, int a, int b) {
    check_product(c, a, b);
    for (int m = 0; m < tiles.config.rows[c]; ++m) {
        __m512 even{}, odd{};
        for (int k = 0; k < tiles.config.colsb[a] / 4; ++k) {
            const unsigned char* left = tiles.data[a][m] + 4 * k;
            const Uints right = load<Uints>(tiles.data[b][k]);
            even = fmadd_ps(set1_ps(widen(left)), (__m512)(right << 16), even);
            odd = fmadd_ps(set1_ps(widen(left + 2)), (__m512)(right >> 16 << 16), odd);
        }
        store<__m512>(tiles.data[c][m], load<__m512>(tiles.data[c][m]) + (even + odd));
    }
}

}  // namespace trivet_emulation

#define TRIVET_E trivet_emulation
#define TRIVET_OP(T, a, op, b) ((__m512i)((TRIVET_E::T)(a)op(TRIVET_E::T)(b)))

#define _mm512_loadu_ps(p) TRIVET_E::load<__m512>(p)
#define _mm512_load_ps(p) TRIVET_E::load<__m512>(p)
#define _mm512_loadu_pd(p) TRIVET_E::load<__m512d>(p)
#define _mm512_loadu_si512(p) TRIVET_E::load<__m512i>(p)
#define _mm512_load_si512(p) TRIVET_E::load<__m512i>(p)
#define _mm512_storeu_ps(p, v) TRIVET_E::store<__m512>(p, v)
#define _mm512_store_ps(p, v) TRIVET_E::store<__m512>(p, v)
#define _mm512_storeu_pd(p, v) TRIVET_E::store<__m512d>(p, v)
#define _mm512_storeu_si512(p, v) TRIVET_E::store<__m512i>(p, v)
#define _mm512_store_si512(p, v) TRIVET_E::store<__m512i>(p, v)
#define _mm512_setzero_ps() \
    __m512 {}
#define _mm512_setzero_pd() \
    __m512d {}
#define _mm512_setzero_si512() \
    __m512i {}
#define _mm512_set1_ps(x) TRIVET_E::set1_ps(x)
#define _mm512_set1_pd(x) TRIVET_E::set1_pd(x)
#define _mm512_set1_epi32(x) TRIVET_E::set1_epi32(x)
#define _mm512_set1_epi64(x) TRIVET_E::set1_epi64(x)
#define _mm512_set1_epi16(x) TRIVET_E::set1_epi16(x)
#define _mm512_set1_epi8(x) TRIVET_E::set1_epi8(x)
#undef _mm512_setr_epi32
#undef _mm512_setr_ps
#define _mm512_setr_epi32(...) TRIVET_E::setr_epi32(__VA_ARGS__)
#define _mm512_setr_ps(...) TRIVET_E::setr_ps(__VA_ARGS__)
#define _mm512_castps_si512(v) TRIVET_E::cast<__m512i>(v)
#define _mm512_castsi512_ps(v) TRIVET_E::cast<__m512>(v)
#define _mm512_castps512_ps256(v) TRIVET_E::low(v)
#define _mm512_castsi512_si256(v) TRIVET_E::low(v)
#define _mm512_castpd512_pd256(v) TRIVET_E::low(v)
#define _mm512_extractf32x8_ps(v, i) ((i) ? TRIVET_E::high(v) : TRIVET_E::low(v))
#define _mm512_extractf64x4_pd(v, i) ((i) ? TRIVET_E::high(v) : TRIVET_E::low(v))
#define _mm512_extracti64x4_epi64(v, i) ((i) ? TRIVET_E::high(v) : TRIVET_E::low(v))
#define _mm512_extracti32x8_epi32(v, i) ((i) ? TRIVET_E::high(v) : TRIVET_E::low(v))
#define _mm512_inserti64x4(v, half, i) \
    ((i) ? TRIVET_E::join(TRIVET_E::low(v), half) : TRIVET_E::join(half, TRIVET_E::high(v)))

#define _mm512_maskz_loadu_ps(k, p) (TRIVET_E::mask_load<float, 16>(__m512{}, k, p))
#define _mm512_mask_loadu_ps(s, k, p) (TRIVET_E::mask_load<float, 16, __m512>(s, k, p))
#define _mm512_maskz_loadu_epi32(k, p) (TRIVET_E::mask_load<int, 16>(__m512i{}, k, p))
#define _mm512_maskz_loadu_epi16(k, p) (TRIVET_E::mask_load<short, 32>(__m512i{}, k, p))
#define _mm512_maskz_loadu_epi8(k, p) (TRIVET_E::mask_load<char, 64>(__m512i{}, k, p))
#define _mm512_mask_storeu_ps(p, k, v) (TRIVET_E::mask_store<float, 16, __m512>(p, k, v))
#define _mm512_mask_storeu_epi32(p, k, v) (TRIVET_E::mask_store<int, 16, __m512i>(p, k, v))
#define _mm512_mask_storeu_epi8(p, k, v) (TRIVET_E::mask_store<char, 64, __m512i>(p, k, v))
#define _mm512_mask_mov_ps(s, k, v) (TRIVET_E::blend<float, 16, __m512>(k, s, v))
#define _mm512_maskz_mov_ps(k, v) (TRIVET_E::blend<float, 16, __m512>(k, __m512{}, v))
#define _mm512_mask_mov_epi32(s, k, v) (TRIVET_E::blend<int, 16, __m512i>(k, s, v))
#define _mm512_maskz_mov_epi32(k, v) (TRIVET_E::blend<int, 16, __m512i>(k, __m512i{}, v))
#define _mm512_maskz_mov_epi16(k, v) (TRIVET_E::blend<short, 32, __m512i>(k, __m512i{}, v))
#define _mm512_mask_blend_ps(k, a, b) (TRIVET_E::blend<float, 16, __m512>(k, a, b))
#define _mm512_mask_blend_epi32(k, a, b) (TRIVET_E::blend<int, 16, __m512i>(k, a, b))
#define _mm256_mask_storeu_epi8(p, k, v) (TRIVET_E::mask_store<char, 32, __m256i>(p, k, v))
#define _mm256_mask_storeu_epi16(p, k, v) (TRIVET_E::mask_store<short, 16, __m256i>(p, k, v))
#define _mm256_maskz_loadu_epi16(k, p) (TRIVET_E::mask_load<short, 16>(__m256i{}, k, p))
#define _mm_mask_storeu_epi8(p, k, v) (TRIVET_E::mask_store<char, 16, __m128i>(p, k, v))
#define _mm_maskz_loadu_epi8(k, p) (TRIVET_E::mask_load<char, 16>(__m128i{}, k, p))

#define _mm512_cmp_ps_mask(a, b, predicate) (TRIVET_E::cmp_ps<predicate>(a, b))
#define _mm512_cmp_pd_mask(a, b, predicate) (TRIVET_E::cmp_pd<predicate>(a, b))
#define _mm512_cmplt_epi32_mask(a, b) TRIVET_E::to_mask((TRIVET_E::Ints)(a) < (TRIVET_E::Ints)(b))
#define _mm512_cmpgt_epi32_mask(a, b) TRIVET_E::to_mask((TRIVET_E::Ints)(a) > (TRIVET_E::Ints)(b))
#define _mm512_cmpge_epi32_mask(a, b) TRIVET_E::to_mask((TRIVET_E::Ints)(a) >= (TRIVET_E::Ints)(b))
#define _mm512_cmpeq_epi32_mask(a, b) TRIVET_E::to_mask((TRIVET_E::Ints)(a) == (TRIVET_E::Ints)(b))
#define _mm512_cmpgt_epu32_mask(a, b) \
    TRIVET_E::to_mask((TRIVET_E::Ints)((TRIVET_E::Uints)(a) > (TRIVET_E::Uints)(b)))
#define _mm512_cmplt_epu32_mask(a, b) \
    TRIVET_E::to_mask((TRIVET_E::Ints)((TRIVET_E::Uints)(a) < (TRIVET_E::Uints)(b)))

#define _mm512_add_ps(a, b) ((__m512)((a) + (b)))
#define _mm512_sub_ps(a, b) ((__m512)((a) - (b)))
#define _mm512_mul_ps(a, b) ((__m512)((a) * (b)))
#define _mm512_div_ps(a, b) ((__m512)((a) / (b)))
#define _mm512_add_pd(a, b) ((__m512d)((a) + (b)))
#define _mm512_sub_pd(a, b) ((__m512d)((a) - (b)))
#define _mm512_mul_pd(a, b) ((__m512d)((a) * (b)))
#define _mm512_max_ps(a, b) TRIVET_E::max_ps(a, b)
#define _mm512_min_ps(a, b) TRIVET_E::min_ps(a, b)
#define _mm512_sqrt_ps(v) TRIVET_E::sqrt_ps(v)
#define _mm512_fmadd_ps(a, b, c) TRIVET_E::fmadd_ps(a, b, c)
#define _mm512_fnmadd_ps(a, b, c) TRIVET_E::fnmadd_ps(a, b, c)
#define _mm512_mask3_fmadd_ps(a, b, c, k) \
    (TRIVET_E::blend<float, 16, __m512>(k, c, TRIVET_E::fmadd_ps(a, b, c)))
#define _mm512_mask_fmadd_ps(a, k, b, c) \
    (TRIVET_E::blend<float, 16, __m512>(k, a, TRIVET_E::fmadd_ps(a, b, c)))
#define _mm512_mask_add_ps(s, k, a, b) \
    (TRIVET_E::blend<float, 16, __m512>(k, s, (__m512)((a) + (b))))
#define _mm512_xor_ps(a, b) \
    TRIVET_E::cast<__m512>(TRIVET_E::cast<__m512i>(a) ^ TRIVET_E::cast<__m512i>(b))

#define _mm512_add_epi32(a, b) TRIVET_OP(Uints, a, +, b)
#define _mm512_sub_epi32(a, b) TRIVET_OP(Uints, a, -, b)
#define _mm512_mullo_epi32(a, b) TRIVET_OP(Uints, a, *, b)
#define _mm512_add_epi64(a, b) TRIVET_OP(Ulongs, a, +, b)
#define _mm512_add_epi16(a, b) TRIVET_OP(Shorts, a, +, b)
#define _mm512_sub_epi8(a, b) TRIVET_OP(Chars, a, -, b)
#define _mm512_add_epi8(a, b) TRIVET_OP(Chars, a, +, b)
#define _mm512_and_si512(a, b) TRIVET_OP(Longs, a, &, b)
#define _mm512_or_si512(a, b) TRIVET_OP(Longs, a, |, b)
#define _mm512_xor_si512(a, b) TRIVET_OP(Longs, a, ^, b)
#define _mm512_and_epi32(a, b) TRIVET_OP(Longs, a, &, b)
#define _mm512_or_epi32(a, b) TRIVET_OP(Longs, a, |, b)
#define _mm512_xor_epi32(a, b) TRIVET_OP(Longs, a, ^, b)
#define _mm512_slli_epi32(v, n) ((__m512i)((TRIVET_E::Uints)(v) << (n)))
#define _mm512_srli_epi32(v, n) ((__m512i)((TRIVET_E::Uints)(v) >> (n)))
#define _mm512_srai_epi32(v, n) ((__m512i)((TRIVET_E::Ints)(v) >> (n)))
#define _mm512_slli_epi64(v, n) ((__m512i)((TRIVET_E::Ulongs)(v) << (n)))
#define _mm512_srli_epi64(v, n) ((__m512i)((TRIVET_E::Ulongs)(v) >> (n)))
#define _mm512_max_epu32(a, b) TRIVET_E::max_epu32(a, b)
#define _mm512_max_epi32(a, b) TRIVET_E::max_epi32(a, b)
#define _mm512_min_epi32(a, b) TRIVET_E::min_epi32(a, b)
#define _mm512_mul_epu32(a, b) TRIVET_E::mul_epu32(a, b)
#define _mm512_madd_epi16(a, b) TRIVET_E::madd_epi16(a, b)
#define _mm512_abs_epi8(v) TRIVET_E::abs_epi8(v)
#define _mm512_dpbusd_epi32(acc, a, b) TRIVET_E::dpbusd_epi32(acc, a, b)

#define _mm512_cvtph_ps(v) TRIVET_E::cvtph_ps(v)
#define _mm512_cvtps_pd(v) TRIVET_E::cvtps_pd(v)
#define _mm512_cvtpd_ps(v) TRIVET_E::cvtpd_ps(v)
#define _mm512_cvtps_epi32(v) TRIVET_E::cvtps_epi32(v)
#define _mm512_cvtepi32_ps(v) TRIVET_E::cvtepi32_ps(v)
#define _mm512_cvtepu8_epi32(v) TRIVET_E::cvtepu8_epi32(v)
#define _mm512_cvtepi8_epi32(v) TRIVET_E::cvtepi8_epi32(v)
#define _mm512_cvtepu16_epi32(v) TRIVET_E::cvtepu16_epi32(v)
#define _mm512_cvtepi8_epi16(v) TRIVET_E::cvtepi8_epi16(v)
#define _mm512_cvtepi32_epi16(v) TRIVET_E::cvtepi32_epi16(v)
#define _mm512_cvtepi32_epi8(v) TRIVET_E::cvtepi32_epi8(v)
#define _mm512_permutexvar_epi32(index, v) TRIVET_E::permutexvar_epi32(index, v)
#define _mm512_permute_ps(v, control) TRIVET_E::permute_ps<control>(v)
#define _mm512_shuffle_epi32(v, control) TRIVET_E::shuffle_epi32<control>(v)
#define _mm512_shuffle_f32x4(a, b, control) (TRIVET_E::shuffle_f32x4<control>(a, b))
#define _mm512_reduce_add_epi32(v) TRIVET_E::reduce_add_epi32(v)
#define _mm512_reduce_max_epu32(v) TRIVET_E::reduce_max_epu32(v)
#define _mm512_reduce_max_ps(v) TRIVET_E::reduce_max_ps(v)
#define _cvtu32_mask16(m) static_cast<__mmask16>(m)

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) TRIVET_E::tile_loadconfig(config)
#define _tile_release() TRIVET_E::tile_release()
#define _tile_zero(t) TRIVET_E::tile_zero(t)
#define _tile_loadd(t, base, stride) TRIVET_E::tile_load(t, base, stride)
#define _tile_stream_loadd(t, base, stride) TRIVET_E::tile_load(t, base, stride)
#define _tile_stored(t, base, stride) TRIVET_E::tile_store(t, base, stride)
#define _tile_dpbssd(c, a, b) (TRIVET_E::tile_dpb<signed char, signed char>(c, a, b))
#define _tile_dpbsud(c, a, b) (TRIVET_E::tile_dpb<signed char, unsigned char>(c, a, b))
#define _tile_dpbusd(c, a, b) (TRIVET_E::tile_dpb<unsigned char, signed char>(c, a, b))
#define _tile_dpbuud(c, a, b) (TRIVET_E::tile_dpb<unsigned char, unsigned char>(c, a, b))
#define _tile_dpbf16ps(c, a, b) TRIVET_E::tile_dpbf16ps(c, a, b)
