// Rows split over many blocks, for rows that no cluster holds: one launch finds the numbers of each part of a
// row, a second one merges them and writes the result. Terms: docs/glossary.md.
#pragma once

#include "early.cuh"
#include "held.cuh"
#include "lib/ptx/hopper.cuh"

constexpr int SPLIT_THREADS = 256;
constexpr int SPLIT_BLOCKS = 4;                  // an SM has room for: bounds a thread to 64 registers
constexpr int64_t LEAST_PART = 16 * 1024;        // bytes of a part, so that its numbers cost little beside it
constexpr int MOST_SPLIT_PARTS = SPLIT_THREADS;  // so that each thread merges one part's numbers

// How many parts a row of `bytes` bytes is split into: as many as run at once, if M rows leave room for them.
inline int split_parts(int64_t M, int64_t bytes) {
  const int64_t room = int64_t{SPLIT_BLOCKS} * multiprocessor_count() / M;
  const int64_t most = std::min<int64_t>(MOST_SPLIT_PARTS, cdiv(bytes, LEAST_PART));
  return static_cast<int>(std::clamp<int64_t>(room, 1, most));
}

// A block's part of a row of N elements, in packs that are laid out on the lines of out's row, whose skew in
// a line is `skew`. All packs of all parts are whole and lie `reach` elements before the row's end, as in
// HeldPart; the elements beside them are single, and go to threads of the first part.
template <typename T>
struct SplitPart {
  static constexpr int SIZE = Pack<T>::SIZE;
  int64_t N, begin, end;  // packs of this part
  int64_t tail;           // the first column behind all packs
  int skew, head;         // `head` single elements lie before all packs
  bool first;

  __device__ SplitPart(int64_t N, int skew, int reach, int part, int parts)
      : N(N), skew(skew), head((SIZE - skew % SIZE) % SIZE), first(part == 0) {
    const int64_t packs = (N + skew - reach) / SIZE;
    const int64_t each = cdiv(cdiv(packs, LINE_PACKS), parts) * LINE_PACKS;
    begin = max(part * each, static_cast<int64_t>((skew + SIZE - 1) / SIZE));
    end = min((part + 1) * each, packs);
    tail = packs * SIZE - skew;
  }

  __device__ int64_t column_of(int64_t pack) const { return pack * SIZE - skew; }
  // The column of this thread's single element, or -1.
  __device__ int64_t single() const {
    const int thread = threadIdx.x;
    if (!first) return -1;
    if (thread < head) return thread;
    return tail + thread - head < N ? tail + thread - head : -1;
  }
};

// Issues the loads of packs that lie STEP elements apart; `fill` stands where holds(i) is false. See
// load_held.
template <int STEP, typename T, int PACKS, typename Holds>
__device__ void load_where(Pack<T> (&packs)[PACKS], const T* first, float fill, Holds holds) {
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) set(packs[i], j, from_float<T>(fill));
    uint4& words = packs[i].words;
    asm volatile(
        "{\n"
        ".reg .pred holds;\n"
        "setp.ne.b32 holds, %5, 0;\n"
        "@holds ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(first + STEP * i), "r"(static_cast<int>(holds(i))));
  }
}

// Loads a thread's packs of the tile that begins with pack `tile`. `shift`: see load_shifted; 0 where SKEWS
// are ALIKE.
template <Skews SKEWS, typename T, int PACKS>
__device__ void load_split(Pack<T> (&packs)[PACKS], const T* row, const SplitPart<T>& part, int64_t tile,
                           int shift, float fill) {
  const int64_t pack = tile + threadIdx.x;
  const T* const first = row + part.column_of(pack);
  const auto holds = [&](int i) { return pack + i * SPLIT_THREADS < part.end; };
  if constexpr (SKEWS == Skews::DIFFER) {
    load_shifted<SPLIT_THREADS * Pack<T>::SIZE>(packs, first, shift, fill, holds);
  } else {
    load_where<SPLIT_THREADS * Pack<T>::SIZE>(packs, first, fill, holds);
  }
}

// Elements that a row's packs lie behind a multiple of 16 bytes, if packs are laid out on the lines of out's.
template <typename T>
__device__ int shift_of(const T* row, const T* row_out) {
  return skew_of(row - skew_of(row_out));
}
