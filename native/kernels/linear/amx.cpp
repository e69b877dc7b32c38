// Linear kernels for AMX. A tile of activations (16 rows of 64 bytes) meets a tile of one channel
// block (64 bytes a row, 16 channels of 4 bytes), which the packed layout holds as 1024 consecutive
// bytes.
//
// TDPBF16PS is the contract's bf16 product. TDPBSSD sums int8 exactly; with groups the int32 tile
// is stored after every group and combined in float32 as the contract says. 4-bit codes are
// unpacked to signed bytes first, less their offset.
//
// Tiles: 0 to 3 sums, 4 and 5 activations, 6 and 7 weights. They are configured once per call, all
// with min(rows, 16) rows: the last row tile overlaps the one before, and only its own rows are
// kept. Tiles are released at the end of the call. A few rows are left to the AVX-512 kernels,
// which give the same bits.
#include <immintrin.h>

#include "kernels/linear/linear.h"

namespace trivet::amx {
namespace {

constexpr int32_t kMinRows = 4;       // fewer rows go to AVX-512
constexpr int32_t kMinGroupRows = 8;  // the same for grouped codes, which leave the tile per group
constexpr int32_t kMinGroup = 32;     // groups of 16 columns would leave most of a tile empty
constexpr int32_t kTileRows = 16;
constexpr int32_t kPanelColumns = 1024;  // 4-bit columns unpacked at a time: 16 KiB
constexpr int32_t kPanelTiles = 8;       // row tiles that share one unpacked panel

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t colsb[16] = {};
    uint8_t rows[16] = {};
};

// The compiler does not know that tile instructions read memory.
inline void publish(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Configures the tiles for products over `k_bytes` bytes of each row.
void configure(int32_t rows, int32_t k_bytes) {
    TileConfig config;
    const int32_t tile_rows = rows < kTileRows ? rows : kTileRows;
    for (int tile = 0; tile < 8; ++tile) {
        const bool weights = tile >= 6, activations = tile == 4 || tile == 5;
        config.rows[tile] = static_cast<uint8_t>(weights ? k_bytes / 4 : tile_rows);
        config.colsb[tile] = static_cast<uint16_t>(activations ? k_bytes : 64);
    }
    publish(&config);
    _tile_loadconfig(&config);
}

// Row tile `index` of a call: its first row, and the rows [begin, end) of it that are its own.
struct RowTile {
    int32_t first, begin, end;
};

inline RowTile row_tile(int32_t index, int32_t rows) {
    if (rows < kTileRows) return {0, 0, rows};
    const int32_t wanted = index * kTileRows, last = rows - kTileRows;
    const int32_t first = wanted < last ? wanted : last;
    return {first, wanted - first, kTileRows};
}

inline int32_t num_row_tiles(int32_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Adds the bias, then writes one row's 16 outputs or adds them to what is there.
inline void store(const LinearWeight& w, int32_t block, __m512 y, float* out_row, bool accumulate) {
    const int32_t channel = block * 16, left = w.n - channel;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    if (w.bias != nullptr) y = _mm512_add_ps(y, _mm512_loadu_ps(w.bias + channel));
    float* out = out_row + channel;
    if (accumulate) y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), y);
    _mm512_mask_storeu_ps(out, mask, y);
}

// ---- whole rows: up to 2 row tiles against 2 blocks, over all of K ----

enum class Product { kBf16, kInt8 };

// Leaves the sums of (row tile i, block j) in out[i][j], float32 or int32 [16][16].
// a0, a1: rows of the tiles, b0, b1: codes of the blocks; bytes: of one row of a. Where there is no
// second row tile or block, a1 or b1 is null.
template <Product kProduct>
inline void multiply(const uint8_t* a0, const uint8_t* a1, const uint8_t* b0, const uint8_t* b1,
                     int64_t bytes, int32_t (*out)[2][16][16]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < bytes; k += 64) {
        _tile_loadd(6, b0 + 16 * k, 64);
        _tile_loadd(4, a0 + k, bytes);
        if constexpr (kProduct == Product::kBf16) {
            _tile_dpbf16ps(0, 4, 6);
        } else {
            _tile_dpbssd(0, 4, 6);
        }
        if (a1 != nullptr) {
            _tile_loadd(5, a1 + k, bytes);
            if constexpr (kProduct == Product::kBf16) {
                _tile_dpbf16ps(2, 5, 6);
            } else {
                _tile_dpbssd(2, 5, 6);
            }
        }
        if (b1 == nullptr) continue;
        _tile_loadd(7, b1 + 16 * k, 64);
        if constexpr (kProduct == Product::kBf16) {
            _tile_dpbf16ps(1, 4, 7);
        } else {
            _tile_dpbssd(1, 4, 7);
        }
        if (a1 == nullptr) continue;
        if constexpr (kProduct == Product::kBf16) {
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, out[0][0], 64);
    _tile_stored(1, out[0][1], 64);
    _tile_stored(2, out[1][0], 64);
    _tile_stored(3, out[1][1], 64);
}

template <Product kProduct>
void whole_rows(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr bool kFloat = kProduct == Product::kBf16;
    alignas(64) int32_t sums[2][2][16][16];
    const int64_t bytes = int64_t(w.k_padded) * (kFloat ? 2 : 1);
    const auto* rows = kFloat ? reinterpret_cast<const uint8_t*>(x.bf16)
                              : reinterpret_cast<const uint8_t*>(x.codes);
    const auto* codes = static_cast<const uint8_t*>(w.codes);
    const int32_t tiles = num_row_tiles(x.rows);
    configure(x.rows, 64);
    for (int32_t tile = 0; tile < tiles; tile += 2) {
        const int32_t tile_pair = tile + 1 < tiles ? 2 : 1;
        const uint8_t* a[2] = {nullptr, nullptr};
        for (int i = 0; i < tile_pair; ++i) a[i] = rows + row_tile(tile + i, x.rows).first * bytes;
        for (int32_t block = block_begin; block < block_end; block += 2) {
            const int32_t block_pair = block + 1 < block_end ? 2 : 1;
            const uint8_t* b[2] = {codes + block * 16 * bytes, nullptr};
            if (block_pair == 2) b[1] = b[0] + 16 * bytes;
            multiply<kProduct>(a[0], a[1], b[0], b[1], bytes, sums);
            for (int i = 0; i < tile_pair; ++i) {
                const RowTile t = row_tile(tile + i, x.rows);
                for (int j = 0; j < block_pair; ++j) {
                    for (int32_t r = t.begin; r < t.end; ++r) {
                        const __m512i sum = _mm512_load_si512(sums[i][j][r]);
                        __m512 y = _mm512_castsi512_ps(sum);
                        if constexpr (!kFloat) {
                            const auto* scales = static_cast<const float*>(w.scales);
                            const __m512 scale = _mm512_loadu_ps(scales + (block + j) * 16);
                            const __m512 sx = _mm512_set1_ps(x.scales[t.first + r]);
                            y = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(sx, scale));
                        }
                        store(w, block + j, y, out + (t.first + r) * out_stride, accumulate);
                    }
                }
            }
        }
    }
    _tile_release();
}

void bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
          float* out, ptrdiff_t out_stride, bool accumulate) {
    const LinearFn kernel =
        x.rows < kMinRows ? avx512::linear_kernels.bf16 : whole_rows<Product::kBf16>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void int8_row(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
              float* out, ptrdiff_t out_stride, bool accumulate) {
    const LinearFn kernel =
        x.rows < kMinRows ? avx512::linear_kernels.int8_row : whole_rows<Product::kInt8>;
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

// ---- groups ----

template <ScaleType kScale>
inline __m512 load_scales(const void* values, int64_t index) {
    if constexpr (kScale == ScaleType::kF32) {
        return _mm512_loadu_ps(static_cast<const float*>(values) + index);
    } else {
        const auto* p = static_cast<const uint16_t*>(values) + index;
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
}

// Groups [group_begin, group_end) of one block unpacked to signed bytes, [columns / 4][16][4].
template <Scheme kScheme>
void unpack_panel(const LinearWeight& w, int32_t block, int32_t group_begin, int32_t group_end,
                  int8_t* panel) {
    const __m512i low = _mm512_set1_epi8(15);
    const auto* codes = static_cast<const uint8_t*>(w.codes) + int64_t(block) * w.k_padded * 8;
    for (int32_t g = group_begin; g < group_end; ++g) {
        __m512i offset = _mm512_setzero_si512();
        if constexpr (kScheme == Scheme::kSym) offset = _mm512_set1_epi8(8);
        if constexpr (kScheme == Scheme::kZeroPoint) {
            const auto* zeros = w.zeros + scale_index(w, block, g);
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
            const __m512i z = _mm512_cvtepu8_epi32(bytes);
            const __m512i pairs = _mm512_or_si512(z, _mm512_slli_epi32(z, 8));
            offset = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 16));
        }
        const int32_t end = (g + 1) * w.group < w.k_padded ? (g + 1) * w.group : w.k_padded;
        for (int32_t k = g * w.group; k < end; k += 32) {
            for (int i = 0; i < 4; ++i) {
                const __m512i v = _mm512_loadu_si512(codes + int64_t(k) * 8 + 64 * i);
                const __m512i a = _mm512_and_si512(v, low);
                const __m512i b = _mm512_and_si512(_mm512_srli_epi32(v, 4), low);
                int8_t* to = panel + (k - group_begin * w.group) * 16 + 64 * i;
                _mm512_store_si512(to, _mm512_sub_epi8(a, offset));
                _mm512_store_si512(to + 256, _mm512_sub_epi8(b, offset));
            }
        }
    }
    publish(panel);
}

// acc of the tile's own rows += their products with one group. sums: what the tile left.
template <Scheme kScheme, ScaleType kScale>
inline void combine(const LinearWeight& w, const Activations& x, int32_t block, int32_t g,
                    RowTile tile, const int32_t (*sums)[16], float (*acc)[16]) {
    const int64_t index = scale_index(w, block, g);
    const __m512 scale = load_scales<kScale>(w.scales, index);
    __m512 minimum = _mm512_setzero_ps();
    if constexpr (kScheme == Scheme::kMin) minimum = load_scales<kScale>(w.minima, index);
    for (int32_t r = tile.begin; r < tile.end; ++r) {
        const int64_t at = int64_t(tile.first + r) * w.num_groups + g;
        const __m512 t = _mm512_mul_ps(_mm512_set1_ps(x.scales[at]), scale);
        __m512 y = _mm512_load_ps(acc[r]);
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[r])), t, y);
        if constexpr (kScheme == Scheme::kMin) {
            const float u = static_cast<float>(x.sums[at]) * x.scales[at];
            y = _mm512_fmadd_ps(_mm512_set1_ps(u), minimum, y);
        }
        _mm512_store_ps(acc[r], y);
    }
}

// Groups [group_begin, group_end) of one block against one row tile; codes are signed bytes from
// the first of these groups on. Two groups are in flight, so that tiles work while sums combine.
template <Scheme kScheme, ScaleType kScale>
void tile_groups(const LinearWeight& w, const Activations& x, int32_t block, const int8_t* codes,
                 RowTile tile, int32_t group_begin, int32_t group_end, float (*acc)[16]) {
    alignas(64) int32_t sums[2][16][16];
    const int8_t* rows = x.codes + int64_t(tile.first) * w.k_padded;
    const int32_t step = w.group < 64 ? w.group : 64;
    for (int32_t g = group_begin; g < group_end; g += 2) {
        const bool pair = g + 1 < group_end;
        const int32_t begin = g * w.group, middle = begin + w.group;
        const int32_t first_end = middle < w.k_padded ? middle : w.k_padded;
        _tile_zero(0);
        for (int32_t k = begin; k < first_end; k += step) {
            _tile_loadd(6, codes + int64_t(k - group_begin * w.group) * 16, 64);
            _tile_loadd(4, rows + k, w.k_padded);
            _tile_dpbssd(0, 4, 6);
        }
        _tile_stored(0, sums[0], 64);
        if (pair) {
            const int32_t end = middle + w.group < w.k_padded ? middle + w.group : w.k_padded;
            _tile_zero(1);
            for (int32_t k = middle; k < end; k += step) {
                _tile_loadd(7, codes + int64_t(k - group_begin * w.group) * 16, 64);
                _tile_loadd(5, rows + k, w.k_padded);
                _tile_dpbssd(1, 5, 7);
            }
            _tile_stored(1, sums[1], 64);
        }
        combine<kScheme, kScale>(w, x, block, g, tile, sums[0], acc);
        if (pair) combine<kScheme, kScale>(w, x, block, g + 1, tile, sums[1], acc);
    }
}

template <WeightKind kKind, Scheme kScheme, ScaleType kScale>
void group_rows(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    alignas(64) int8_t panel[kPanelColumns * 16];
    alignas(64) float acc[kPanelTiles][16][16];
    const int32_t tiles = num_row_tiles(x.rows);
    const int32_t groups_per_panel = kPanelColumns / w.group;
    configure(x.rows, w.group < 64 ? w.group : 64);
    for (int32_t block = block_begin; block < block_end; ++block) {
        const auto* codes = static_cast<const int8_t*>(w.codes) + int64_t(block) * w.k_padded * 16;
        for (int32_t first = 0; first < tiles; first += kPanelTiles) {
            const int32_t end = first + kPanelTiles < tiles ? first + kPanelTiles : tiles;
            for (auto& tile : acc) {
                for (auto& row : tile) _mm512_store_ps(row, _mm512_setzero_ps());
            }
            for (int32_t g = 0; g < w.num_groups; g += groups_per_panel) {
                const int32_t g_end =
                    g + groups_per_panel < w.num_groups ? g + groups_per_panel : w.num_groups;
                const int8_t* panel_codes = panel;
                if constexpr (kKind == WeightKind::kInt4Group) {
                    unpack_panel<kScheme>(w, block, g, g_end, panel);
                } else {
                    panel_codes = codes + int64_t(g) * w.group * 16;
                }
                for (int32_t tile = first; tile < end; ++tile) {
                    tile_groups<kScheme, kScale>(w, x, block, panel_codes, row_tile(tile, x.rows),
                                                 g, g_end, acc[tile - first]);
                }
            }
            for (int32_t tile = first; tile < end; ++tile) {
                const RowTile t = row_tile(tile, x.rows);
                for (int32_t r = t.begin; r < t.end; ++r) {
                    store(w, block, _mm512_load_ps(acc[tile - first][r]),
                          out + (t.first + r) * out_stride, accumulate);
                }
            }
        }
    }
    _tile_release();
}

template <WeightKind kKind, Scheme kScheme>
LinearFn group_kernel(ScaleType scale_type) {
    return scale_type == ScaleType::kF16 ? group_rows<kKind, kScheme, ScaleType::kF16>
                                         : group_rows<kKind, kScheme, ScaleType::kF32>;
}

void int8_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    LinearFn kernel = avx512::linear_kernels.int8_group;
    if (x.rows >= kMinGroupRows && w.group >= kMinGroup) {
        constexpr WeightKind kKind = WeightKind::kInt8Group;
        kernel = group_kernel<kKind, Scheme::kSym>(w.scale_type);
        if (w.scheme == Scheme::kMin) kernel = group_kernel<kKind, Scheme::kMin>(w.scale_type);
    }
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void int4_group(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
                float* out, ptrdiff_t out_stride, bool accumulate) {
    constexpr WeightKind kKind = WeightKind::kInt4Group;
    LinearFn kernel = avx512::linear_kernels.int4_group;
    if (x.rows >= kMinGroupRows && w.group >= kMinGroup) {
        kernel = group_kernel<kKind, Scheme::kSym>(w.scale_type);
        if (w.scheme == Scheme::kZeroPoint) {
            kernel = group_kernel<kKind, Scheme::kZeroPoint>(w.scale_type);
        }
        if (w.scheme == Scheme::kMin) kernel = group_kernel<kKind, Scheme::kMin>(w.scale_type);
    }
    kernel(w, x, block_begin, block_end, out, out_stride, accumulate);
}

// 4-bit and e4m3 codes with bf16 activations stay on vectors, which unpack them in registers.
void int4_bf16(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
               float* out, ptrdiff_t out_stride, bool accumulate) {
    avx512::linear_kernels.int4_bf16(w, x, block_begin, block_end, out, out_stride, accumulate);
}

void fp8(const LinearWeight& w, const Activations& x, int32_t block_begin, int32_t block_end,
         float* out, ptrdiff_t out_stride, bool accumulate) {
    avx512::linear_kernels.fp8(w, x, block_begin, block_end, out, out_stride, accumulate);
}

}  // namespace

const LinearKernels linear_kernels = {bf16, int8_row, int8_group, int4_group, int4_bf16, fp8};

}  // namespace trivet::amx
