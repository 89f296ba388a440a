// Which of the levels the kernels were compiled for this processor can run, best first.
extern "C" __attribute__((visibility("default"))) int reprise_supports(const char* level) {
    switch (level[0] == 'p' ? 0 : level[3]) {
        case 0: return 1;  // portable
#if defined(__x86_64__)
        case '2': return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case '5':
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("fma");
#endif
        default: return 0;
    }
}
