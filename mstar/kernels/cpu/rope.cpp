// Rotary embedding, and writing keys and values into pages.
#include "pool.h"
#include "vector.h"

namespace mstar {
namespace {

constexpr int64_t GRAIN = 1 << 12;     // elements that are worth another thread
constexpr int64_t MAX_GATHERED = 512;  // frequencies that may follow several positions

template <class T> void rotate(T* head, const float* cos, const float* sin, int64_t half) {
    const int64_t whole = half / VW * VW;
    for (int64_t i = 0; i < whole; i += VW) {
        vf a = load_vector(head + i), b = load_vector(head + half + i), c = load<vf>(cos + i), s = load<vf>(sin + i);
        store_vector(head + i, a * c - b * s);
        store_vector(head + half + i, b * c + a * s);
    }
    for (int64_t i = whole; i < half; i++) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        from_float(a * cos[i] - b * sin[i], head[i]);
        from_float(b * cos[i] + a * sin[i], head[half + i]);
    }
}

struct RopeAndKv {
    int64_t threads, tokens, heads, head_dim, half, max_position;  // heads == 0: keys and values are only stored
    int64_t qkv_stride, kv_width, num_slots;                       // num_slots == 0: they are only rotated
    int64_t k_stride, v_stride, num_axes;                          // num_axes: positions per token
};

// Cosines and sines of one token: rows of the tables, or entries of several rows.
struct Angles {
    const float *cos, *sin;
    float own_cos[MAX_GATHERED], own_sin[MAX_GATHERED];

    void look_up(const RopeAndKv& s, const float* cos_table, const float* sin_table, const int32_t* positions,
                 const int32_t* axes) {
        cos = axes ? own_cos : cos_table + *positions * s.half;
        sin = axes ? own_sin : sin_table + *positions * s.half;
        for (int64_t i = 0; axes && i < s.half; i++) {
            own_cos[i] = cos_table[positions[axes[i]] * s.half + i];
            own_sin[i] = sin_table[positions[axes[i]] * s.half + i];
        }
    }
};

template <class T> int rope_and_kv(const Arg* arg) {
    const RopeAndKv& s = *reinterpret_cast<const RopeAndKv*>(arg);
    const int32_t *positions = arg[14].as<int32_t>(), *slots = arg[17].as<int32_t>(), *axes = arg[22].as<int32_t>();
    const float *cos = arg[15].as<float>(), *sin = arg[16].as<float>();
    for (int64_t i = 0; s.heads && i < s.tokens * s.num_axes; i++)
        if (positions[i] < 0 || positions[i] >= s.max_position) return BAD_POSITION;
    for (int64_t i = 0; axes && i < s.half; i++)
        if (axes[i] < 0 || axes[i] >= s.num_axes) return BAD_POSITION;
    for (int64_t t = 0; s.num_slots && t < s.tokens; t++)
        if (slots[t] >= s.num_slots) return BAD_SLOT;
    const int64_t work = s.tokens * (s.heads * s.head_dim + 2 * s.kv_width);
    parallel_ranges(s.threads, s.tokens, work, GRAIN, [&](int64_t from, int64_t to) {
        Angles angles;
        for (int64_t t = from; t < to; t++) {
            T* qkv = arg[13].as<T>() + t * s.qkv_stride;
            if (s.heads) angles.look_up(s, cos, sin, positions + t * s.num_axes, axes);
            for (int64_t h = 0; h < s.heads; h++) rotate(qkv + h * s.head_dim, angles.cos, angles.sin, s.half);
            if (s.num_slots && slots[t] >= 0) {
                const size_t bytes = size_t(s.kv_width) * sizeof(T);
                std::memcpy(arg[20].as<T>() + slots[t] * s.kv_width, arg[18].as<T>() + t * s.k_stride, bytes);
                std::memcpy(arg[21].as<T>() + slots[t] * s.kv_width, arg[19].as<T>() + t * s.v_stride, bytes);
            }
        }
    });
    return OK;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

// the fields of RopeAndKv, is bf16, qkv, positions, cos, sin, slots, k, v, k_pages, v_pages, axes or null
KERNEL(mstar_rope_and_kv) { return arg[12].i ? rope_and_kv<bf16>(arg) : rope_and_kv<float>(arg); }
