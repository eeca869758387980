// Tiles of short rows in shared memory, for rows that are no whole packs: global memory is read and written
// by 16-byte words, shared memory element by element. Terms: docs/glossary.md.
#pragma once

#include <initializer_list>
#include <utility>

#include "lib/ptx/ampere.cuh"
#include "packs.cuh"

constexpr int TILE_THREADS = 256;
constexpr int TILE_ITEMS = 8;              // most elements of a row that a lane has
constexpr int64_t LONGEST_TILE_ROW = 512;  // bytes: a longer row is faster in registers
constexpr int64_t WORD_BYTES = 16;         // of a copy
constexpr int64_t TILE_BYTES = 12 * 1024;  // of an input's tile, so that an SM has several blocks
static_assert(LONGEST_TILE_ROW / 2 <= 32 * TILE_ITEMS, "a warp holds a row of two-byte elements");

// The words of 16 bytes that a row of N elements touches at most.
template <typename T>
__host__ __device__ constexpr int words_of(int N) {
  return static_cast<int>(most_packs<T>(N));
}

// Whether the rows of an input lie so near each other that what is between them is copied with them: no more
// than a word, or little beside a row.
template <typename T>
__host__ __device__ constexpr bool are_dense(int N, int64_t stride) {
  const int64_t gap = stride - N, size = sizeof(T);
  return gap >= 0 && (gap * size <= WORD_BYTES || 4 * gap <= N);
}

// The words of an input's tile of `rows` rows: dense rows as they lie in global memory; of other rows each
// begins with the word in which it begins there.
template <typename T>
__host__ __device__ constexpr int tile_words(int rows, int N, int64_t stride) {
  return are_dense<T>(N, stride) ? static_cast<int>(most_packs<T>(rows * stride)) : rows * words_of<T>(N);
}

// The rows of an input that a block has in shared memory.
template <typename T, int THREADS = TILE_THREADS>
struct TileRows {
  const T* first;  // row, in global memory
  int64_t stride;
  int N, count;  // of the rows that there are
  uint4* words;
  const T* end;  // of the tensor, in global memory

  // Issues this thread's asynchronous copies. A word that ends behind the tensor is loaded element by
  // element.
  __device__ void load() const {
    if (N == 0) return;  // no word holds an element
    if (are_dense<T>(N, stride)) {
      load_row(first, (count - 1) * static_cast<int>(stride) + N, words, threadIdx.x, THREADS);
      return;
    }
    const int each = words_of<T>(N);
    for (int i = threadIdx.x; i < count * each; i += THREADS) {
      load_row(first + i / each * stride, N, words + i / each * each, i % each, each);
    }
  }
  // Row r, after all threads' copies have arrived.
  __device__ const T* operator[](int r) const {
    if (are_dense<T>(N, stride)) return reinterpret_cast<const T*>(words) + skew_of(first) + r * stride;
    return reinterpret_cast<const T*>(words + r * words_of<T>(N)) + skew_of(first + r * stride);
  }

 private:
  // Copies the words from number `word` on, `step` from each to the next, that hold one of `elements`
  // elements. Through L1, where the neighbour of a word that two rows share finds it.
  __device__ void load_row(const T* row, int elements, uint4* to, int word, int step) const {
    constexpr int SIZE = Pack<T>::SIZE;
    for (int column = word * SIZE - skew_of(row); column < elements; word += step, column += step * SIZE) {
      const T* const from = row + column;
      if (end - from >= SIZE) {
        cp_async<16, Caches::L1_AND_L2>(to + word, from, true);
      } else {
        for (int i = 0; i < end - from; ++i) reinterpret_cast<T*>(to + word)[i] = from[i];
      }
    }
  }
};

// The contiguous rows of out that a block has, first in shared memory at the same skew.
template <typename T, int THREADS = TILE_THREADS>
struct TileOut {
  T* first;  // row, in global memory
  int N, count;
  uint4* words;

  __device__ T* operator[](int r) const { return reinterpret_cast<T*>(words) + skew_of(first) + r * N; }

  // After all threads have written their elements.
  __device__ void store() const {
    constexpr int SIZE = Pack<T>::SIZE;
    const int skew = skew_of(first), elements = count * N;
    for (int i = threadIdx.x; i * SIZE < elements + skew; i += THREADS) {
      store_pack(first, i * SIZE - skew, elements, true, Pack<T>{words[i]});
    }
  }
};

// The shape of a launch over M rows of N elements: lanes a row, rows a block (of which each group of lanes
// has the same number), blocks, and the shared memory of a block for out and for inputs of these strides.
template <typename T>
struct TileShape {
  int lanes = 1, rows;
  int64_t blocks;
  int shared_bytes;

  TileShape(int64_t M, int N, std::initializer_list<int64_t> strides) {
    while (lanes * TILE_ITEMS < N) lanes *= 2;
    const int64_t groups = TILE_THREADS / lanes;
    const int64_t least_blocks = 2 * int64_t{multiprocessor_count()};
    const int64_t each =
        std::min(TILE_BYTES / (groups * 16 * words_of<T>(N)), cdiv(M, groups * least_blocks));
    rows = static_cast<int>(groups * std::max<int64_t>(1, each));
    blocks = cdiv(M, rows);
    shared_bytes = 16 * static_cast<int>(most_packs<T>(int64_t{rows} * N));
    for (const int64_t stride : strides) shared_bytes += 16 * tile_words<T>(rows, N, stride);
  }
};

// Calls launch(LANES) with an integral constant.
template <typename Launch>
void choose_tile_lanes(int lanes, Launch launch) {
  const auto choose = [&]<int... SHIFTS>(std::integer_sequence<int, SHIFTS...>) {
    (void)((lanes == 1 << SHIFTS ? (launch(std::integral_constant<int, 1 << SHIFTS>{}), true) : false) ||
           ...);
  };
  choose(std::make_integer_sequence<int, 6>{});
}
