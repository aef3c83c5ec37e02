// What the files of probes share, included inside their namespace after their struct Args: a probe is a function that the
// one entry calls by number, its place in the file.
using Run = void (*)(const Args&);
inline std::vector<Run> runs;
inline int add(Run run) {
    runs.push_back(run);
    return 0;
}
#define PROBE(name)                                           \
    static void name(const Args& args);                       \
    [[maybe_unused]] static const int add_##name = add(name); \
    static void name([[maybe_unused]] const Args& args)

template <typename T>
T input(const Args& args, int index) {
    return load_global<T>(args.in + index * sizeof(T));
}
template <typename T>
void output(const Args& args, int index, T value) {
    store_global(args.out + index * sizeof(T), value);
}

extern "C" __global__ void cuflash_probe(const __grid_constant__ Args args) { runs[args.number](args); }
