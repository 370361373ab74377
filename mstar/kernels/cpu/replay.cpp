// Runs a recorded sequence of kernel calls. The program is words: per call its function, the number of its argument
// words and the arguments themselves, whose first is the number of threads.
#include "vector.h"

using namespace mstar;

extern "C" __attribute__((visibility("default"))) int mstar_replay(Arg* program, int64_t words, int64_t threads) {
    for (Arg* at = program; at < program + words; at += 2 + at[1].i) {
        at[2].i = threads;
        const auto kernel = reinterpret_cast<int (*)(const Arg*)>(at[0].p);
        if (const int status = kernel(at + 2)) return status;
    }
    return OK;
}
