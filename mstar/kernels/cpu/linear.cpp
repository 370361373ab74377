// y = x · Wᵀ + b.
#include "matrix.h"

namespace mstar {
namespace {

template <class T, class O>
void linear(const Shape& s, const T* x, const uint32_t* w, const float* bias, O* out, int64_t max_threads) {
    const int64_t cols = (s.out + VW - 1) / VW, groups = (cols + NR - 1) / NR;
    const int64_t wanted = s.rows * s.in * s.out / PRODUCTS_PER_THREAD, threads = wanted < max_threads ? wanted : max_threads;
    if (threads <= 1) return block(s, x, w, bias, out, 0, s.rows, 0, cols);
    int64_t col_parts = threads * PARTS_PER_THREAD, row_parts = 1;
    if (col_parts > groups) {  // many threads on few columns share the rows too
        col_parts = groups < threads ? groups : groups / threads * threads;
        const int64_t tiles = (s.rows + 4 * MR - 1) / (4 * MR), wanted_parts = threads * PARTS_PER_THREAD / col_parts;
        row_parts = wanted_parts < 1 ? 1 : wanted_parts < tiles ? wanted_parts : tiles;
    }
    parallel(threads, row_parts * col_parts, [&](int64_t part) {
        const int64_t i = part / col_parts, j = part % col_parts;
        block(s, x, w, bias, out, share(s.rows, row_parts, i), share(s.rows, row_parts, i + 1),
              share(cols, col_parts, j), share(cols, col_parts, j + 1));
    });
}

}  // namespace
}  // namespace mstar

using namespace mstar;

// threads, rows, in, out, x stride, out stride, x is bf16, out is bf16, x, w, bias or null, out
KERNEL(mstar_linear) {
    const Shape s{arg[1].i, arg[2].i, arg[3].i, arg[4].i, arg[5].i};
    const auto* w = static_cast<const uint32_t*>(arg[9].p);
    const auto* bias = static_cast<const float*>(arg[10].p);
    if (!arg[6].i)
        linear(s, arg[8].as<const float>(), w, bias, arg[11].as<float>(), arg[0].i);
    else if (arg[7].i)
        linear(s, arg[8].as<const bf16>(), w, bias, arg[11].as<bf16>(), arg[0].i);
    else
        linear(s, arg[8].as<const bf16>(), w, bias, arg[11].as<float>(), arg[0].i);
    return OK;
}

extern "C" __attribute__((visibility("default"))) int64_t mstar_vector_width() { return VW; }
