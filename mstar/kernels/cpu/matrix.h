// Blocks of x · Wᵀ over weights in the packed layout of panel.h, whose summed dimension is the inputs.
#pragma once
#include "panel.h"
#include "pool.h"

namespace mstar {

constexpr int64_t PASS_WORDS = 1536;  // inputs per pass: NR packed columns of them stay in the second-level cache
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 16;  // what is worth another thread

struct Shape {
    int64_t rows, in, out, x_stride, out_stride;
};

template <class O>
void finish(const float* sums, int64_t rows, int64_t cols, const float* bias, O* out, int64_t out_stride,
            int64_t columns) {
    for (int64_t r = 0; r < rows; r++, sums += NR * VW, out += out_stride)
        for (int64_t c = 0; c < cols * VW; c += VW) {
            if (columns - c >= VW) {
                vf y = load<vf>(sums + c);
                store_vector(out + c, bias ? y + load<vf>(bias + c) : y);
            } else {
                for (int64_t i = c; i < columns; i++) from_float(bias ? sums[i] + bias[i] : sums[i], out[i]);
            }
        }
}

// Rows [row, row_end) times packed columns [col, col_end) (counted in vectors), on one thread. Columns are the outer
// loop: each weight comes from memory once, and while one group of columns meets its rows the next is fetched.
template <class T, class O>
void block(const Shape& s, const T* x, const uint32_t* w, const float* bias, O* out, int64_t row, int64_t row_end,
           int64_t col, int64_t col_end) {
    const int64_t words = s.in / WORD<T>, stride = (s.in + WORD<T> - 1) / WORD<T>;
    const int64_t tiles = (row_end - row + MR - 1) / MR, groups = (col_end - col + NR - 1) / NR;
    const bool one_pass = words <= PASS_WORDS;
    static thread_local Scratch scratch;
    float* all_sums = reinterpret_cast<float*>(scratch.reserve((one_pass ? 1 : tiles) * MR * NR * VW * sizeof(float)));
    for (int64_t g = 0; g < groups; g++) {
        const int64_t c0 = col + share(col_end - col, groups, g), c1 = col + share(col_end - col, groups, g + 1);
        for (int64_t k = 0; k == 0 || k < words; k += PASS_WORDS) {
            const int64_t pass = words - k < PASS_WORDS ? words - k : PASS_WORDS;
            const bool last = k + pass == words;
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t r0 = row + share(row_end - row, tiles, t), r1 = row + share(row_end - row, tiles, t + 1);
                float* sums = all_sums + (one_pass ? 0 : t * MR * NR * VW);
                Prefetch next;
                if (one_pass && g + 1 < groups && t < NR) {
                    next.lines = tiles >= NR ? 1 : tiles > 1 ? 2 : NR;
                    next.from = reinterpret_cast<const char*>(w + (c1 + t * next.lines) * stride * VW);
                }
                panel_of<T>(r1 - r0, c1 - c0)(x + r0 * s.x_stride + k * WORD<T>, s.x_stride,
                                              w + (c0 * stride + k) * VW, stride * VW, pass,
                                              last && stride != words, sums, NR * VW, k == 0, next);
                if (last)
                    finish(sums, r1 - r0, c1 - c0, bias ? bias + c0 * VW : nullptr,
                           out + r0 * s.out_stride + c0 * VW, s.out_stride, s.out - c0 * VW);
            }
        }
    }
}

}  // namespace mstar
