// Rows that may start anywhere, gone through by columns: a thread has the same columns of all rows, so their
// weights, or their sums, stay in its registers. Used by the two launches for few long rows of layer_norm's
// v12, rms_norm's v07, and of the dispatching steps of both gradients. Terms: docs/glossary.md.
#pragma once

#include <initializer_list>

#include "lib/packs.cuh"

constexpr int STRIP_THREADS = 256;
constexpr int MOST_ROW_PARTS = 256;  // of a row: a lane has the numbers of all its parts under way at once
// Columns of a thread in the second launch, whose sums it keeps, and of its block.
constexpr int THREAD_COLUMNS = 4, STRIP_COLUMNS = STRIP_THREADS * THREAD_COLUMNS;

// WIDTH neighbouring elements, moved by one access. A width that divides all addresses and row lengths needs
// neither shifts nor special ends, whatever the rows' skews: a row is so many whole words.
template <typename T, int WIDTH>
struct Word {
  static constexpr int BYTES = WIDTH * static_cast<int>(sizeof(T)), REGISTERS = BYTES < 4 ? 1 : BYTES / 4;
  uint32_t bits[REGISTERS];

  // Issues the load if `wanted`; else all elements are `fill`. By a predicate, because the compiler waits for
  // loads before a branch.
  __device__ void load_if(const T* place, bool wanted, float fill) {
    float fills[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) fills[i] = fill;
    round(fills);
    const int wants = wanted;
    if constexpr (BYTES == 2) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.u16 %0, [%1];\n}"
                   : "+r"(bits[0])
                   : "l"(place), "r"(wants));
    } else if constexpr (BYTES == 4) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
                   : "+r"(bits[0])
                   : "l"(place), "r"(wants));
    } else if constexpr (BYTES == 8) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
                   : "+r"(bits[0]), "+r"(bits[1])
                   : "l"(place), "r"(wants));
    } else {
      static_assert(BYTES == 16);
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                   : "+r"(bits[0]), "+r"(bits[1]), "+r"(bits[2]), "+r"(bits[3])
                   : "l"(place), "r"(wants));
    }
  }

  // Stores the word, which is read again soon.
  __device__ void store(T* place) const {
    using Pair = std::conditional_t<BYTES == 8, uint2, uint4>;
    using Access = std::conditional_t<BYTES == 2, uint16_t, std::conditional_t<BYTES == 4, uint32_t, Pair>>;
    Access access;
    memcpy(&access, bits, BYTES);
    *reinterpret_cast<Access*>(place) = access;
  }

  // Stores the word if `wanted`; L2 replaces it first, and keeps what will be read.
  __device__ void store_if(T* place, bool wanted) const {
    const int wants = wanted;
    if constexpr (BYTES == 2) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.cs.u16 [%1], %0;\n}" ::"r"(bits[0]),
                   "l"(place), "r"(wants)
                   : "memory");
    } else if constexpr (BYTES == 4) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.cs.b32 [%1], %0;\n}" ::"r"(bits[0]),
                   "l"(place), "r"(wants)
                   : "memory");
    } else if constexpr (BYTES == 8) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.cs.v2.b32 [%2], {%0, %1};\n}" ::"r"(bits[0]),
          "r"(bits[1]), "l"(place), "r"(wants)
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cs.v4.b32 [%4], {%0, %1, %2, %3};\n}" ::"r"(
              bits[0]),
          "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "l"(place), "r"(wants)
          : "memory");
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(bits[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? bits[i / 2] & 0xffff0000 : bits[i / 2] << 16);
    } else {
      const auto& pair = reinterpret_cast<const __half2&>(bits[i / 2]);
      return i % 2 ? __high2float(pair) : __low2float(pair);
    }
  }

  // Rounds the values to T, two by one instruction where there are two.
  __device__ void round(const float (&values)[WIDTH]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) bits[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < REGISTERS; ++i) {
        const float first = values[2 * i], second = WIDTH == 1 ? 0.0f : values[WIDTH == 1 ? 0 : 2 * i + 1];
        if constexpr (std::is_same_v<T, __nv_bfloat16>) {
          reinterpret_cast<__nv_bfloat162&>(bits[i]) = __floats2bfloat162_rn(first, second);
        } else {
          reinterpret_cast<__half2&>(bits[i]) = __floats2half2_rn(first, second);
        }
      }
    }
  }
};

// Where a thread's columns lie in a block's columns `start` and on, of which `end` lie in the row: words that
// are STRIP_THREADS words apart, so that the words of neighbouring threads are neighbours.
template <int WIDTH>
struct WordPlace {
  static constexpr int STEP = STRIP_THREADS * WIDTH;
  int64_t start;
  int first, end;

  // The columns from `start` on, at most `most`, of a row of N.
  __device__ WordPlace(int64_t N, int64_t start, int most)
      : start(start),
        first(static_cast<int>(threadIdx.x) * WIDTH),
        end(static_cast<int>(min(N - start, int64_t{most}))) {}

  __device__ int at(int word) const { return first + word * STEP; }
  __device__ bool has(int word) const { return at(word) < end; }
};

// A thread's COLUMNS columns of a row.
template <typename T, int WIDTH, int COLUMNS>
struct RowWords {
  static constexpr int WORDS = COLUMNS / WIDTH;
  Word<T, WIDTH> words[WORDS];

  // Issues the loads of a row's words. `fill` stands where the row has no column, or if not `wanted`.
  __device__ void load(const T* row, const WordPlace<WIDTH>& place, bool wanted, float fill = 0.0f) {
    const T* const first = row + (place.start + place.first);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      words[i].load_if(first + i * WordPlace<WIDTH>::STEP, wanted && place.has(i), fill);
    }
  }
  __device__ float operator[](int i) const { return words[i / WIDTH][i % WIDTH]; }
  // Adds another row, and rounds the sums to T.
  __device__ void add(const RowWords& other) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      float sums[WIDTH];
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) sums[j] = words[i][j] + other.words[i][j];
      words[i].round(sums);
    }
  }
  // Stores the words, which are read again soon.
  __device__ void store(T* row, const WordPlace<WIDTH>& place) const {
    T* const first = row + (place.start + place.first);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if (place.has(i)) words[i].store(first + i * WordPlace<WIDTH>::STEP);
    }
  }
};

// Stores a thread's values to a row of Out, if `wanted`.
template <int WIDTH, typename Out, int COLUMNS>
__device__ void store_words(Out* row, const WordPlace<WIDTH>& place, bool wanted,
                            const float (&values)[COLUMNS]) {
  constexpr int STORED = std::min(WIDTH, Pack<Out>::SIZE);  // elements of an access
  Out* const first = row + (place.start + place.first);
#pragma unroll
  for (int i = 0; i < COLUMNS / WIDTH; ++i) {
#pragma unroll
    for (int j = 0; j < WIDTH; j += STORED) {
      Word<Out, STORED> word;
      float its[STORED];
#pragma unroll
      for (int k = 0; k < STORED; ++k) its[k] = values[i * WIDTH + j + k];
      word.round(its);
      word.store_if(first + i * WordPlace<WIDTH>::STEP + j, wanted && place.has(i));
    }
  }
}

// Calls launch(WIDTH), an integral constant: the elements of the widest word, of up to THREAD_COLUMNS, that
// divides all places and all lengths, which count elements. Null places divide by any width.
template <typename T, typename Launch>
auto choose_width(std::initializer_list<const void*> places, std::initializer_list<int64_t> lengths,
                  Launch launch) {
  uint64_t all = 0;
  for (const void* place : places) all |= reinterpret_cast<uintptr_t>(place) / sizeof(T);
  for (const int64_t length : lengths) all |= static_cast<uint64_t>(length);
  if (all % THREAD_COLUMNS == 0) return launch(std::integral_constant<int, THREAD_COLUMNS>{});
  return all % 2 == 0 ? launch(std::integral_constant<int, 2>{}) : launch(std::integral_constant<int, 1>{});
}
