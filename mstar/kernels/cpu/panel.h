// The inner product of every matrix kernel here: a few rows against a few packed columns, accumulators in registers.
//
// Packed columns: [columns / VW][words][VW] words; a word holds one fp32 or two bf16 values that follow each other along
// the summed dimension, so one vector load gives VW columns and one word of x, repeated in every lane, meets them.
//
// An output is one chain of accumulations in ascending order of the summed dimension, whatever the number of rows
// beside it: results are the same bits in any batch.
#pragma once
#include <cstdlib>
#include <new>

#include "vector.h"

namespace mstar {

// Cache lines to fetch ahead for the caller's next panel, `lines` of them per word of this one.
struct Prefetch {
    const char* from = nullptr;
    int64_t lines = 0;
};

// sums [ROWS][COLS * VW] (+)= x [ROWS][words] · w. `half_word`: one more summed element follows the last whole word.
template <class T, int ROWS, int COLS>
void panel(const T* x, int64_t x_stride, const uint32_t* w, int64_t w_stride, int64_t words, bool half_word,
           float* sums, int64_t sums_stride, bool first, Prefetch next) {
    vf acc[ROWS][COLS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) acc[r][c] = first ? vf{} : load<vf>(sums + r * sums_stride + c * VW);
    auto step = [&](int64_t k, size_t bytes) __attribute__((always_inline)) {
        vu col[COLS];
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) col[c] = load<vu>(w + c * w_stride + k * VW);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            uint32_t a = 0;
            std::memcpy(&a, x + r * x_stride + k * WORD<T>, bytes);
#pragma GCC unroll 8
            for (int c = 0; c < COLS; c++) acc[r][c] = dot<T>(acc[r][c], col[c], splat(a));
        }
    };
    for (int64_t k = 0; k < words; k++) {
        for (int64_t i = 0; i < next.lines; i++) __builtin_prefetch(next.from + (k * next.lines + i) * 64, 0, 2);
        step(k, 4);
    }
    if (half_word) step(words, 2);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLS; c++) store(sums + r * sums_stride + c * VW, acc[r][c]);
}

template <class T>
using Panel = void (*)(const T*, int64_t, const uint32_t*, int64_t, int64_t, bool, float*, int64_t, bool, Prefetch);

template <class T, int ROWS> Panel<T> panel_of_rows(int64_t cols) {
    static constexpr Panel<T> by_cols[] = {panel<T, ROWS, 1>, panel<T, ROWS, 2>, panel<T, ROWS, NR < 3 ? NR : 3>,
                                           panel<T, ROWS, NR>};
    return by_cols[cols - 1];
}

// The panel for 1 to MR rows and 1 to NR vectors of columns.
template <class T> Panel<T> panel_of(int64_t rows, int64_t cols) {
    switch (rows) {
        case 1: return panel_of_rows<T, 1>(cols);
        case 2: return panel_of_rows<T, 2>(cols);
        case 3: return panel_of_rows<T, 3>(cols);
        case 4: return panel_of_rows<T, 4>(cols);
        case 5: return panel_of_rows<T, 5>(cols);
        default: return panel_of_rows<T, 6>(cols);
    }
}

// Memory that one thread keeps between calls, aligned to cache lines. It only grows.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    char* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + 4095) / 4096 * 4096;
            data_ = static_cast<char*>(std::aligned_alloc(64, size_));
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }

  private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace mstar
