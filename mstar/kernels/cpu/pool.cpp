// The pool behind pool.h.
//
// A forward is hundreds of short loops, and the cores are shared with the control plane and the front process. So no
// thread waits for one that has not begun: parts are claimed from one counter, and if the others sleep or are not
// scheduled the caller does everything itself. Idle threads look for work for some microseconds, as long as the next
// loop of the same forward takes to come, and then sleep; they yield in between, so that they never hold a core that
// somebody needs. (OpenMP runtimes give each loop's share to a thread by number and spin for milliseconds.)
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

namespace mstar {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr auto SPIN = std::chrono::microseconds(50);
constexpr int RELAXES_PER_YIELD = 64;

class Pool {
  public:
    void run(int64_t threads, int64_t parts, void (*run)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner) {
            for (int64_t i = 0; i < parts; i++) run(context, i);
            return;
        }
        while (workers_ < threads - 1) start_worker();
        run_ = run;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        helpers_.store(threads - 1, std::memory_order_relaxed);
        const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(epoch << 32 | uint64_t(parts) << 16);
        if (sleepers_.load()) {
            { std::lock_guard<std::mutex> lock(sleep_); }
            wake_.notify_all();
        }
        while (work()) {
        }
        for (int i = 1; done_.load(std::memory_order_acquire) != parts; i++)
            if (i % RELAXES_PER_YIELD)
                relax();
            else
                sched_yield();
    }

    // In the child of a fork the workers are gone.
    void forget_workers() { new (this) Pool(); }

  private:
    static bool has_part(uint64_t ticket) { return (ticket & 0xffff) < (ticket >> 16 & 0xffff); }

    // Claims a part and runs it. The ticket is epoch, number of parts and next part in one word: a claim cannot hit
    // another loop than the one that was read, and until its part is done that loop's function stays valid.
    bool work() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (has_part(ticket))
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                run_(context_, int64_t(ticket & 0xffff));
                done_.fetch_add(1, std::memory_order_release);
                return true;
            }
        return false;
    }

    void start_worker() {
        const int64_t number = workers_++;
        std::thread([this, number] {
            for (;;) serve(number);
        }).detach();
    }

    void serve(int64_t number) {
        auto allowed = [&] { return number < helpers_.load(std::memory_order_relaxed); };
        auto idle_since = std::chrono::steady_clock::now();
        for (int i = 1;; i++) {
            if (has_part(ticket_.load(std::memory_order_acquire)) && allowed()) {
                while (work()) {
                }
                idle_since = std::chrono::steady_clock::now();
            } else if (i % RELAXES_PER_YIELD) {
                relax();
            } else {
                if (std::chrono::steady_clock::now() - idle_since > SPIN) break;
                sched_yield();
            }
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return has_part(ticket_.load()) && allowed(); });
        sleepers_.fetch_sub(1);
    }

    std::mutex owner_;
    int64_t workers_ = 0;
    void (*run_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::atomic<int64_t> helpers_{0};  // workers that the present loop may use
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};

Pool& pool() {
    alignas(Pool) static char memory[sizeof(Pool)];  // never destroyed: its threads outlive static destructors
    static Pool* instance = [] {
        auto* made = new (memory) Pool();
        pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
        return made;
    }();
    return *instance;
}

}  // namespace

void run_parts(int64_t threads, int64_t parts, void (*run)(void*, int64_t), void* context) {
    pool().run(threads, parts, run, context);
}

}  // namespace mstar
