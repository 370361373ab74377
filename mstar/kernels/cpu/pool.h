// Parallel loops over a pool of threads that the process shares.
#pragma once
#include <cstdint>
#include <type_traits>

namespace mstar {

// Calls run(context, i) once for every i in [0, parts) on up to `threads` threads, the caller among them, and returns
// when all calls have. parts < 65536. A pool that serves another caller leaves the work to the caller alone.
void run_parts(int64_t threads, int64_t parts, void (*run)(void* context, int64_t part), void* context);

// f(part) for every part in [0, parts).
template <class F> void parallel(int64_t threads, int64_t parts, F&& f) {
    if (threads > 1 && parts > 1) {
        run_parts(
            threads, parts, [](void* context, int64_t part) { (*static_cast<std::remove_reference_t<F>*>(context))(part); },
            &f);
    } else {
        for (int64_t i = 0; i < parts; i++) f(i);
    }
}

// First element of part i of `parts` nearly equal parts of [0, total).
inline int64_t share(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

// f(from, to) over [0, total) in a few parts per thread; `work` elementary operations in all, of which `grain` are
// worth another thread.
constexpr int64_t PARTS_PER_THREAD = 2;
template <class F> void parallel_ranges(int64_t max_threads, int64_t total, int64_t work, int64_t grain, F&& f) {
    const int64_t wanted = work / grain, threads = wanted < max_threads ? wanted : max_threads;
    const int64_t parts = threads <= 1 ? 1 : threads * PARTS_PER_THREAD < total ? threads * PARTS_PER_THREAD : total;
    parallel(threads, parts, [&](int64_t i) { f(share(total, parts, i), share(total, parts, i + 1)); });
}

}  // namespace mstar
