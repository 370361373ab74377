// Activations that multiply one row by another.
#pragma once
#include "vector.h"

namespace mstar {

// x · f(gate), in place. `f` takes and gives vectors.
template <class T, class F> void gate_row(T* x, const T* gate, int64_t width, F f) {
    const int64_t whole = width / VW * VW;
    for (int64_t i = 0; i < whole; i += VW) store_vector(x + i, load_vector(x + i) * f(load_vector(gate + i)));
    for (int64_t i = whole; i < width; i++) from_float(to_float(x[i]) * f(splat(to_float(gate[i])))[0], x[i]);
}

// silu(gate) · up of a row that holds the gate and then the other factor.
template <class T> void silu_and_mul_row(const T* gate, int64_t width, T* out) {
    const T* up = gate + width;
    const int64_t whole = width / VW * VW;
    for (int64_t i = 0; i < whole; i += VW) store_vector(out + i, silu(load_vector(gate + i)) * load_vector(up + i));
    for (int64_t i = whole; i < width; i++)
        from_float(silu(splat(to_float(gate[i])))[0] * to_float(up[i]), out[i]);
}

}  // namespace mstar
