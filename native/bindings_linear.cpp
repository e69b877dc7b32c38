// Single linear and activation kernels of any level, for tests and measurements: the model's
// forward calls the same tables without passing through here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "core/fp_state.h"
#include "kernels/linear/linear.h"
#include "kernels/quantize/quantize.h"

namespace nb = nanobind;

namespace {

using namespace trivet;

template <class T, size_t Rank>
using Array = nb::ndarray<T, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const LinearKernels& linear_table(const std::string& level) {
    switch (parse_level(level)) {
#ifdef TRIVET_X86
        case Level::kAvx2:
            return avx2::linear_kernels;
        case Level::kAvx512:
            return avx512::linear_kernels;
        case Level::kAmx:
            return amx::linear_kernels;
#endif
        default:
            return generic::linear_kernels;
    }
}

const QuantizeKernels& quantize_table(const std::string& level) {
    switch (parse_level(level)) {
#ifdef TRIVET_X86
        case Level::kAvx2:
            return avx2::quantize_kernels;
        case Level::kAvx512:
        case Level::kAmx:
            return avx512::quantize_kernels;
#endif
        default:
            return generic::quantize_kernels;
    }
}

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

size_t codes_bytes(const LinearWeight& w) {
    const size_t count = size_t(w.n_padded) * w.k_padded;
    if (w.kind == WeightKind::kBf16) return count * 2;
    return is_int4(w.kind) ? count / 2 : count;
}

// Whether the optional array is there when it is needed, with `bytes` bytes.
const uint8_t* part(const std::optional<Bytes>& array, bool needed, size_t bytes,
                    const char* what) {
    if (!needed) return nullptr;
    require(array && array->nbytes() == bytes, what);
    return array->data();
}

void linear(const std::string& level, int kind, int scheme, int scale_type, int32_t n, int32_t k,
            int32_t group, Bytes codes, std::optional<Bytes> scales, std::optional<Bytes> minima,
            std::optional<Bytes> zeros, std::optional<Array<const float, 1>> bias, int32_t rows,
            Bytes x_codes, std::optional<Array<const float, 2>> x_scales,
            std::optional<Array<const int32_t, 2>> x_sums, int32_t block_begin, int32_t block_end,
            Array<float, 2> out, bool accumulate) {
    require(kind >= 0 && kind <= 6 && scheme >= 0 && scheme <= 2, "kind or scheme is unknown");
    require(scale_type == 0 || scale_type == 1, "scale_type is unknown");
    require(n > 0 && k > 0 && rows >= 0, "n and k are positive, rows not negative");
    LinearWeight w{};
    w.kind = static_cast<WeightKind>(kind);
    w.scheme = static_cast<Scheme>(scheme);
    w.scale_type = static_cast<ScaleType>(scale_type);
    w.n = n;
    w.k = k;
    w.n_padded = (n + 15) / 16 * 16;
    w.k_padded = (k + 63) / 64 * 64;
    const bool row = w.kind == WeightKind::kInt8Row, integer = w.kind != WeightKind::kBf16;
    w.group = row || !integer ? w.k_padded : group;
    require(w.group == 16 || (w.group > 0 && w.group % 32 == 0), "group is 16 or a multiple of 32");
    w.num_groups = (k + w.group - 1) / w.group;
    w.scale_groups = w.kind == WeightKind::kInt4Row ? 1 : w.num_groups;
    require(codes.nbytes() == codes_bytes(w), "codes have the wrong size");
    w.codes = codes.data();
    const size_t per_group = size_t(w.n_padded) * w.scale_groups;
    const size_t scale_bytes = per_group * (scale_type == 0 ? 2 : 4);
    w.scales = part(scales, integer, scale_bytes, "scales are missing or have the wrong size");
    w.minima = part(minima, w.scheme == Scheme::kMin, scale_bytes,
                    "minima are missing or have the wrong size");
    w.zeros = part(zeros, w.scheme == Scheme::kZeroPoint, per_group,
                   "zeros are missing or have the wrong size");
    require(!bias || bias->shape(0) == size_t(w.n_padded), "bias is [n_padded]");
    w.bias = bias ? bias->data() : nullptr;

    Activations x{};
    x.rows = rows;
    x.k_padded = w.k_padded;
    x.num_groups = w.num_groups;
    const bool wide = takes_bf16(w.kind);
    const size_t x_bytes = size_t(rows) * w.k_padded * (wide ? 2 : 1);
    require(x_codes.nbytes() == x_bytes, "activations have the wrong size");
    if (wide) {
        x.bf16 = reinterpret_cast<const uint16_t*>(x_codes.data());
        if (integer && w.scheme == Scheme::kMin) {
            require(x_scales && x_scales->shape(0) == size_t(rows) &&
                        x_scales->shape(1) == size_t(w.num_groups),
                    "x_scales are sums [rows, num_groups]");
            x.scales = x_scales->data();
        }
    } else {
        auto fits = [&](const auto& array) {
            return array && array->shape(0) == size_t(rows) &&
                   array->shape(1) == size_t(w.num_groups);
        };
        require(fits(x_scales) && fits(x_sums), "x_scales and x_sums are [rows, num_groups]");
        x.codes = reinterpret_cast<const int8_t*>(x_codes.data());
        x.scales = x_scales->data();
        x.sums = x_sums->data();
    }
    require(block_begin >= 0 && block_begin <= block_end && block_end <= w.n_padded / 16,
            "blocks lie in [0, n_padded / 16]");
    require(out.shape(0) == size_t(rows) && out.shape(1) >= size_t(n), "out is [rows, >= n]");
    const LinearFn kernel = select(linear_table(level), w.kind);
    nb::gil_scoped_release release;
    const FpState state;
    kernel(w, x, block_begin, block_end, out.data(), ptrdiff_t(out.shape(1)), accumulate);
}

void quantize_bf16(const std::string& level, Array<const float, 2> x, Array<uint16_t, 2> codes) {
    const auto rows = x.shape(0);
    const auto k = int32_t(x.shape(1)), k_padded = (k + 63) / 64 * 64;
    require(codes.shape(0) == rows && codes.shape(1) == size_t(k_padded),
            "codes are [rows, k_padded]");
    const QuantizeKernels& table = quantize_table(level);
    nb::gil_scoped_release release;
    const FpState state;
    for (size_t r = 0; r < rows; ++r) {
        table.to_bf16(x.data() + r * k, k, k_padded, codes.data() + r * k_padded);
    }
}

void group_sums(Array<const uint16_t, 2> x, int32_t group, Array<float, 2> sums) {
    require(x.shape(1) % 64 == 0 && group > 0 && group % 16 == 0, "x is padded to 64, group to 16");
    require(sums.shape(0) == x.shape(0) && (sums.shape(1) - 1) * size_t(group) < x.shape(1),
            "sums are [rows, groups]");
    const FpState state;
    for (size_t r = 0; r < x.shape(0); ++r) {
        sum_bf16_groups(x.data() + r * x.shape(1), int32_t(x.shape(1)), group,
                        int32_t(sums.shape(1)), sums.data() + r * sums.shape(1));
    }
}

void quantize_int8(const std::string& level, Array<const float, 2> x, int32_t group,
                   int32_t hadamard, float amax, Array<int8_t, 2> codes, Array<float, 2> scales,
                   Array<int32_t, 2> sums) {
    const auto rows = x.shape(0);
    const auto k = int32_t(x.shape(1)), k_padded = (k + 63) / 64 * 64;
    require(k > 0 && group >= 0 && (group == 16 || group % 32 == 0),
            "group is 0 (whole row), 16 or a multiple of 32");
    require(hadamard >= 1 && hadamard <= 64 && k % hadamard == 0 && !(hadamard & (hadamard - 1)),
            "hadamard is a power of two up to 64 that divides k");
    const size_t num_groups = group == 0 ? 1 : size_t((k + group - 1) / group);
    require(codes.shape(0) == rows && codes.shape(1) == size_t(k_padded),
            "codes are [rows, k_padded]");
    require(scales.shape(0) == rows && scales.shape(1) == num_groups, "scales are [rows, groups]");
    require(sums.shape(0) == rows && sums.shape(1) == num_groups, "sums are [rows, groups]");
    const QuantizeKernels& table = quantize_table(level);
    nb::gil_scoped_release release;
    const FpState state;
    std::vector<float> scratch(k_padded);
    for (size_t r = 0; r < rows; ++r) {
        const float* row = x.data() + r * k;
        int8_t* row_codes = codes.data() + r * k_padded;
        float* row_scales = scales.data() + r * num_groups;
        int32_t* row_sums = sums.data() + r * num_groups;
        if (group == 0) {
            table.to_int8_row(row, k, k_padded, hadamard, amax, scratch.data(), row_codes,
                              row_scales, row_sums);
        } else {
            table.to_int8_group(row, k, k_padded, group, row_codes, row_scales, row_sums);
        }
    }
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.def("kernel_linear", linear, nb::arg("level"), nb::arg("kind"), nb::arg("scheme"),
          nb::arg("scale_type"), nb::arg("n"), nb::arg("k"), nb::arg("group"), nb::arg("codes"),
          nb::arg("scales").none(), nb::arg("minima").none(), nb::arg("zeros").none(),
          nb::arg("bias").none(), nb::arg("rows"), nb::arg("x_codes"), nb::arg("x_scales").none(),
          nb::arg("x_sums").none(), nb::arg("block_begin"), nb::arg("block_end"), nb::arg("out"),
          nb::arg("accumulate"),
          "One linear kernel over the channel blocks [block_begin, block_end); packed arrays are "
          "passed as bytes. Writes out.");
    m.def("kernel_quantize_bf16", quantize_bf16, nb::arg("level"), nb::arg("x"), nb::arg("codes"),
          "Rows of x rounded to bf16 into codes.");
    m.def("kernel_group_sums", group_sums, nb::arg("x"), nb::arg("group"), nb::arg("sums"),
          "Sums of the bf16 values of each group of rows of x into sums.");
    m.def("kernel_quantize_int8", quantize_int8, nb::arg("level"), nb::arg("x"), nb::arg("group"),
          nb::arg("hadamard"), nb::arg("amax"), nb::arg("codes"), nb::arg("scales"),
          nb::arg("sums"),
          "Rows of x as int8 per group, or per rotated row when group is 0; of a range amax where "
          "that is not 0.");
}
