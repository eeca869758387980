// The epilogue's store for matmul_bf16's v15 and v19, and linear's v01 and v03: sums of split tiles are added
// up, rounded, staged in shared memory and stored.
#pragma once

#include "tile.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rounds a thread's sums of a piece's columns to T, two to a word.
template <typename T, int COLUMNS = 64>
__device__ inline void round_piece(uint32_t (&words)[16], const float* sums) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; ++i) {
    alignas(4) const T pair[2] = {from_float<T>(sums[i * 2]), from_float<T>(sums[i * 2 + 1])};
    words[i] = *reinterpret_cast<const uint32_t*>(pair);
  }
}

// Stages 64 rows of 64 elements of 2 bytes, swizzled as the copy engine expects.
__device__ inline void stage_piece(uint8_t* piece, const uint32_t (&words)[16]) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // of 16 columns
    const uint32_t fragment[4] = {words[j * 4], words[j * 4 + 1], words[j * 4 + 2], words[j * 4 + 3]};
    stmatrix_x4(piece + row * 128 + ((j * 2 + lane_id / 16) ^ row % 8) * 16, fragment);
  }
}

// Stages 64 rows of COLUMNS elements, fewer than 64, one after the other and not swizzled.
template <int COLUMNS>
__device__ inline void stage_narrow_piece(uint8_t* piece, const uint32_t (&words)[16]) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id % 16;
#pragma unroll
  for (int j = 0; j < COLUMNS / 16; ++j) {
    const uint32_t fragment[4] = {words[j * 4], words[j * 4 + 1], words[j * 4 + 2], words[j * 4 + 3]};
    stmatrix_x4(piece + row * COLUMNS * 2 + (j * 2 + lane_id / 16) * 16, fragment);
  }
}

// Stages 64 rows of 32 fp32 sums, swizzled in the same way.
__device__ inline void stage_piece_fp32(uint8_t* piece, const float* sums) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // 8 columns of the row, and of the eighth row below, which is swizzled alike
    const int chunk = (i / 2 * 2 + lane_id % 4 / 2) ^ row % 8;
    *reinterpret_cast<float2*>(piece + (row + i % 2 * 8) * 128 + chunk * 16 + lane_id % 2 * 8) =
        make_float2(sums[i * 2], sums[i * 2 + 1]);
  }
}

// Stores a staged piece of T whose rows the copy engine cannot take, by the word. `to` is its first element,
// of `cols` > 0 in a row; rows from `rows` on are left out.
template <typename T>
__device__ inline void store_piece(T* to, const uint8_t* piece, int64_t N, int rows, int cols) {
  constexpr int BATCH = 4;  // rows read before the first of them is stored, so that one wait serves all
  const int lane_id = threadIdx.x % 32;
  const int first_row = threadIdx.x % WARPGROUP / 32 * 16;
  T* line = to + first_row * N;
#pragma unroll 1  // else the compiler keeps the places of all rows in registers
  for (int batch = 0; batch < 16; batch += BATCH) {
    const int chunk = lane_id / 4 ^ batch % 8;
    uint32_t words[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const uint8_t* row = piece + (first_row + batch + i) * 128;
      words[i] = *reinterpret_cast<const uint32_t*>(row + (chunk ^ i) * 16 + lane_id % 4 * 4);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const bool inside = first_row + batch + i < rows;
      if constexpr (sizeof(T) == 4) {
        if (inside && lane_id < cols) reinterpret_cast<uint32_t*>(line)[lane_id] = words[i];
      } else {
        // Words begin at even addresses, wherever the row does: where it begins at an odd one, a lane puts
        // its second element and its neighbour's first together, and one element is left at either end.
        const uint32_t next = __shfl_down_sync(0xffffffff, words[i], 1);
        auto* halves = reinterpret_cast<uint16_t*>(line);
        const int shift = reinterpret_cast<uintptr_t>(line) / 2 % 2;
        const uint32_t word = shift ? __byte_perm(words[i], next, 0x5432) : words[i];
        const int col = lane_id * 2 + shift;
        if (inside && col + 1 < cols) *reinterpret_cast<uint32_t*>(halves + col) = word;
        if (inside && col + 1 == cols) halves[col] = static_cast<uint16_t>(word);
        if (inside && shift && lane_id == 0) halves[0] = static_cast<uint16_t>(words[i]);
      }
      line += N;
    }
  }
}

// Adds up the partial sums of the blocks that share a tile, in a fixed order. Returns true in the last block
// to arrive, whose `sums` are then the tile's.
template <typename Tile>
__device__ inline bool join_splits(const MatmulProblem& problem, unsigned* ticket, float (&sums)[Tile::SUMS],
                                   int unit) {
  constexpr int VECTORS = Tile::SUMS / 4;
  const int consumer = threadIdx.x / WARPGROUP - 1;
  const int thread = threadIdx.x % WARPGROUP;
  const int of_cluster = (unit - problem.whole) / problem.splits;
  const int split = unit - problem.whole - of_cluster * problem.splits;
  const int tile = of_cluster * Tile::CLUSTER + (Tile::CLUSTER == 1 ? 0 : cluster_block());
  const auto partial = [&](int of_split) {
    return problem.partials +
           ((int64_t{tile} * problem.splits + of_split) * Tile::CONSUMERS + consumer) * VECTORS * WARPGROUP +
           thread;
  };
  float4* mine = partial(split);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    __stcg(mine + i * WARPGROUP, make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]));
  unsigned* counter = &problem.counters[tile * Tile::CONSUMERS + consumer];
  named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for the warpgroup's partial sums
  if (thread == 0) {
    __threadfence();  // releases what the whole warpgroup has written before the barrier
    *ticket = atomicAdd(counter, 1);
    __threadfence();  // acquires, for all threads past the next barrier, what earlier tickets released
  }
  named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for the ticket
  if (*ticket != problem.splits - 1) return false;

  if (thread == 0) *counter = 0;
#pragma unroll
  for (int i = 0; i < Tile::SUMS; ++i) sums[i] = 0.0f;
  for (int of_split = 0; of_split < problem.splits; ++of_split) {
    const float4* theirs = partial(of_split);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const float4 sum = __ldcg(theirs + i * WARPGROUP);
      sums[i * 4] += sum.x;
      sums[i * 4 + 1] += sum.y;
      sums[i * 4 + 2] += sum.z;
      sums[i * 4 + 3] += sum.w;
    }
  }
  return true;
}

// Stores a warpgroup's 64 rows of a tile through two pieces of shared memory. The rounded sums wait in
// registers until the next tile is being multiplied, and are stored beside its products, two pieces at a
// time, so that the tensor cores wait for no barrier and for no copy.
template <typename Tile>
class TileStore {
  using T = typename Tile::T;
  static constexpr int PIECES = cdiv(Tile::BLOCK_N, 64);
  static_assert(PIECES <= 4, "two pieces are stored at a time, twice");

  const typename Tile::Problem& problem;
  uint8_t (*const pieces)[PIECE_BYTES];
  typename Tile::Epilogue epilogue;
  uint32_t words[PIECES][16];
  int row = 0, col = 0;  // of the tile
  int stored = PIECES;   // pieces of the tile; from PIECES on none waits

  // Waits until the pieces may be written again.
  __device__ void wait_for_pieces() {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_group_read<0>();  // for the copy engine to have read them
    named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for that, and for all threads that read them
  }

  // Starts the stores of staged pieces of `cols` columns by the copy engine. `rest`, if given, is the map of
  // a narrower last piece.
  __device__ void store_pieces(const CUtensorMap* map, int count, int first, int cols,
                               const CUtensorMap* rest = nullptr) {
    fence_proxy_async();                                     // shows the pieces to the copy engine
    named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for all of the pieces
    if (threadIdx.x % WARPGROUP == 0) {
      for (int i = 0; i < count; ++i) {
        const int place = first + i * cols;
        const bool is_rest = Tile::REST > 0 && rest != nullptr && place == col + Tile::WHOLE * 64;
        if (place < problem.N) tma_store(is_rest ? rest : map, pieces[i], place, row);
      }
      bulk_commit_group();
    }
  }

  __device__ void round(const float (&sums)[Tile::SUMS]) {
#pragma unroll
    for (int i = 0; i < Tile::WHOLE; ++i) round_piece<T>(words[i], &sums[i * 32]);
    if constexpr (Tile::REST > 0) round_piece<T, Tile::REST>(words[Tile::WHOLE], &sums[Tile::WHOLE * 32]);
  }

  // Stores two of the rounded pieces, if there are as many.
  template <int FIRST>
  __device__ void store_rounded(const CUtensorMap* map, const CUtensorMap* rest) {
    if constexpr (FIRST < PIECES) {
      constexpr int COUNT = FIRST + 1 < PIECES ? 2 : 1;
      wait_for_pieces();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        FIRST + i < Tile::WHOLE ? stage_piece(pieces[i], words[FIRST + i])
                                : stage_narrow_piece<Tile::REST>(pieces[i], words[FIRST + i]);
      }
      store_pieces(map, COUNT, col + FIRST * 64, 64, rest);
    }
  }

  // Stores one piece after the other at once: fp32, or rows that the copy engine cannot take, which have no
  // map.
  template <typename Out>
  __device__ void store_now(const float (&sums)[Tile::SUMS], const CUtensorMap* map, void* matrix) {
    constexpr int COLS = 128 / sizeof(Out);
    static_assert(Tile::BLOCK_N % 32 == 0,
                  "a narrower last piece of T is half of one, and a whole one of fp32");
#pragma unroll
    for (int i = 0; i < cdiv(Tile::BLOCK_N, COLS); ++i) {
      constexpr int REST = Tile::BLOCK_N % COLS;
      const bool is_rest = REST > 0 && i == Tile::BLOCK_N / COLS;
      const int first = col + i * COLS;
      if (first >= problem.N) break;
      wait_for_pieces();
      if constexpr (sizeof(Out) == 4) {
        stage_piece_fp32(pieces[0], &sums[i * COLS / 2]);
      } else {
        is_rest ? round_piece<T, REST>(words[0], &sums[i * COLS / 2])
                : round_piece<T>(words[0], &sums[i * COLS / 2]);
        stage_piece(pieces[0], words[0]);
      }
      if (map != nullptr && !is_rest) {
        store_pieces(map, 1, first, COLS);
      } else {
        named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for all of the piece
        store_piece(static_cast<Out*>(matrix) + row * problem.N + first, pieces[0], problem.N,
                    static_cast<int>(min(problem.M - row, int64_t{64})),
                    static_cast<int>(min(problem.N - first, int64_t{is_rest ? REST : COLS})));
      }
    }
  }

 public:
  __device__ TileStore(const typename Tile::Problem& problem, uint8_t (*pieces)[PIECE_BYTES])
      : problem(problem), pieces(pieces) {}

  // Finishes the store of the tile before, and notes the next tile's place.
  __device__ void begin(int tile_row, int tile_col) {
    flush<0>();
    flush<2>();
    row = tile_row;
    col = tile_col;
    // Hides where these values come from: without this, ptxas 13.0 uses the next tile's column for this
    // one's.
    asm volatile("" : "+r"(row), "+r"(col));
    epilogue.begin(problem, col);
  }

  __device__ void store(float (&sums)[Tile::SUMS]) {
    if (row >= problem.M) return;
    // An epilogue may store the sums once on the way.
    epilogue.apply(problem, sums,
                   [&](const CUtensorMap* map, void* matrix, const CUtensorMap* rest = nullptr) {
                     if constexpr (Tile::PLAIN_OUT) {
                       round(sums);
                       store_rounded<0>(map, rest);
                       store_rounded<2>(map, rest);
                     } else {
                       store_now<T>(sums, map, matrix);
                     }
                   });
    if constexpr (Tile::PLAIN_OUT) {
      round(sums);
      stored = 0;
    } else {
      const CUtensorMap* map = problem.out_mapped ? &problem.out : nullptr;
      problem.out_fp32 ? store_now<float>(sums, map, problem.out_matrix)
                       : store_now<T>(sums, map, problem.out_matrix);
    }
  }

  // Stores two pieces from FIRST on, if it is their turn.
  template <int FIRST>
  __device__ void flush() {
    if (!Tile::PLAIN_OUT || stored != FIRST) return;
    if constexpr (Tile::REST > 0) {
      store_rounded<FIRST>(&problem.out, &problem.out_rest);
    } else {
      store_rounded<FIRST>(&problem.out, nullptr);
    }
    stored += 2;
  }

  __device__ void finish() {
    flush<0>();
    flush<2>();
    if (threadIdx.x % WARPGROUP == 0)
      bulk_wait_group_read<0>();  // shared memory must outlive the copies from it
  }
};

#endif  // 9.0a
