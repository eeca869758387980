// attention v04_pipelined: the next tiles are fetched while one is computed.
//
// Change:   cp.async fetches keys and values into a ring of stages, past the registers, STAGES - 1 tiles
//           ahead. A block takes 128 queries, by twice the warps.
// Why:      in v03 all warps wait for memory, then compute, behind two barriers a tile. Now memory has the
//           time of whole tiles to answer, and one barrier a tile is left, between which some warps are at
//           the softmax while others feed the tensor cores. A fetched tile serves twice the queries.
// Counter:  time falls; tensor_pipe rises accordingly.
// Requires: as v02; above 64 elements a head 128 KiB of shared memory a block, as 8.0, 9.0 and 10.0 have.
// Source:   as v02; the ring is that of CUTLASS, "Efficient GEMM in CUDA", section "Software Pipelining".
// Twin:     triton-kernels/attention/attention/v04_pipelined.py
#include <cfloat>
#include <type_traits>

#include "args.h"
#include "lib/activation.cuh"
#include "lib/head_limits.h"
#include "lib/ptx/ampere.cuh"

namespace {

constexpr int WARPS = 8;
constexpr int BLOCK_M = WARPS * 16;  // queries; a warp takes as many as an mma.sync
constexpr int BLOCK_N = 64;          // keys of a tile
constexpr int THREADS = WARPS * 32;
constexpr int STAGES = 3;
constexpr int TILES_N = BLOCK_N / 8;  // tiles of one mma.sync in a warp's scores
constexpr int PIECE = 8;              // elements in 16 bytes
constexpr float LN_2 = 0.6931471805599453f;

static_assert(BLOCK_N % 16 == 0 && STAGES >= 2, "pairs divide a tile; one is read, another filled");

template <typename T, int HEAD>
struct Tiles {
  T q[BLOCK_M * HEAD];          // [BLOCK_M, HEAD]
  T k[STAGES][BLOCK_N * HEAD];  // [.., BLOCK_N, HEAD]
  T v[STAGES][BLOCK_N * HEAD];  // [.., BLOCK_N, HEAD]
};

// Where a piece of 16 bytes lies in a tile with rows of HEAD elements. The lower bits of its place in the row
// are XORed with the row, so that 8 neighbours in a column fill all 32 banks just as 8 in a row do.
template <int HEAD>
__device__ inline int swizzled(int row, int piece) {
  return row * HEAD + (piece ^ row % 8) * PIECE;
}

// Copies this thread's part of a tile [ROWS, HEAD] of a matrix [rows, D]. What lies past the edges becomes
// zero: a weight of 0 would make NaN of a NaN there. cp.async reads nothing there, but wants an address.
template <bool WIDE, int ROWS, int HEAD, typename T>
__device__ inline void copy_tile(T* tile, const T* matrix, int64_t stride, int64_t first_row, int64_t rows,
                                 int D) {
  const int count = min(rows - first_row, int64_t{ROWS});
  matrix += first_row * stride;
  if constexpr (WIDE) {
    constexpr int PASS = THREADS / (HEAD / PIECE);  // rows that all threads together fetch a piece each of
    static_assert(PASS % 8 == 0 && ROWS % PASS == 0, "passes are swizzled alike, and all threads take part");
    const int row = threadIdx.x / (HEAD / PIECE), piece = threadIdx.x % (HEAD / PIECE);
    const T* from = matrix + row * stride + piece * PIECE;
    T* to = tile + swizzled<HEAD>(row, piece);
    const int valid_rows = piece * PIECE < D ? count - row : 0;
#pragma unroll
    for (int pass = 0; pass < ROWS / PASS; ++pass) {
      const bool valid = pass * PASS < valid_rows;
      cp_async<16>(to + pass * PASS * HEAD, valid ? from + pass * PASS * stride : matrix, valid);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * HEAD; i += THREADS) {
      const int row = i / HEAD, col = i % HEAD;
      tile[swizzled<HEAD>(row, col / PIECE) + col % PIECE] =
          row < count && col < D ? matrix[row * stride + col] : from_float<T>(0.0f);
    }
  }
}

// Two values rounded to T, in one register.
template <typename T>
__device__ inline uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The limits of a band relative to a tile, in 32 bits: what lies further out makes no difference.
__device__ inline int within(int64_t limit) { return min(max(limit, int64_t{-BLOCK_M}), int64_t{BLOCK_N}); }

// Over the four lanes that hold a row of scores.
__device__ inline float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ inline float row_total(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// A limit of the band, no further out than makes a difference: sums with it cannot overflow.
__device__ inline int64_t clamped(int64_t limit, const AttentionArgs& args) {
  return min(max(limit, -args.Sq), args.Sk);
}

}  // namespace

// HEAD: 64 or 128, at least D. WIDE: rows can be copied in pieces of 16 bytes, and pairs of results stored.
template <typename T, int HEAD, bool WIDE>
__global__ void __launch_bounds__(THREADS, HEAD == 64 && WIDE ? 2 : 1)
    attention_v04_pipelined_kernel(AttentionArgs args) {
  alignas(128) extern __shared__ uint4 shared[];
  Tiles<T, HEAD>& tiles = *reinterpret_cast<Tiles<T, HEAD>*>(shared);

  // The grid is flat, since its y and z would end at 65535. A head's blocks are neighbours: those that run at
  // the same time read the same keys and values, which come from L2.
  const int64_t blocks_m = cdiv(args.Sq, BLOCK_M);
  const int64_t batch = blockIdx.x / blocks_m / args.H;
  const int64_t head = blockIdx.x / blocks_m % args.H;
  const int64_t kv_head = head / (args.H / args.H_KV);
  const int64_t block_row = blockIdx.x % blocks_m * BLOCK_M;
  const int warp_row = threadIdx.x / 32 * 16;  // within the block's tile
  const int lane_id = threadIdx.x % 32;
  const int D = args.D;
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head;
  const T* k = static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head;
  const T* v = static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head;

  // Query `row` of the block sees the keys from first + row to last + row. A band without limits may be of
  // any size, and must not overflow.
  const int64_t first = clamped(args.band.first, args) + block_row;
  const int64_t last = clamped(args.band.last, args) + block_row;
  const int rows = min(args.Sq - block_row, int64_t{BLOCK_M});
  const int64_t end_key = min(last + rows, args.Sk);  // behind all that any of them sees

  // The row whose address a lane gives to ldmatrix, at the first step and tile. The others differ by whole
  // rows, which are added, or in bits of the piece's place, which are XORed.
  const int q_offset = swizzled<HEAD>(warp_row + lane_id % 16, lane_id / 16);
  const int k_offset = swizzled<HEAD>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const int v_offset = swizzled<HEAD>(lane_id % 16, lane_id / 16);

  // A negative scale turns the largest score into the smallest. Its sign goes to the queries, which is exact.
  // A scale of 0 becomes tiny, since 0 * -inf would be NaN.
  const float scale = args.scale == 0.0f ? FLT_MIN : fabsf(args.scale) * LOG2_E;
  const uint32_t signs = args.scale < 0.0f ? 0x80008000 : 0;

  // Past the last tile a group is empty, so that waiting for the oldest goes on to mean the next tile.
  const int64_t first_tile = max(first, int64_t{0}) / BLOCK_N * BLOCK_N;
  const auto copy = [&](int stage, int64_t tile) {
    if (tile < end_key) {
      copy_tile<WIDE, BLOCK_N, HEAD>(tiles.k[stage], k, args.k_stride.row, tile, args.Sk, D);
      copy_tile<WIDE, BLOCK_N, HEAD>(tiles.v[stage], v, args.v_stride.row, tile, args.Sk, D);
    }
    cp_async_commit_group();
  };
  copy_tile<WIDE, BLOCK_M, HEAD>(tiles.q, q, args.q_stride.row, block_row, args.Sq, D);
  cp_async_commit_group();
  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage, first_tile + stage * BLOCK_N);

  uint32_t queries[HEAD / 16][4];
  cp_async_wait_group<STAGES - 1>();  // for this thread's part of the queries
  __syncthreads();                    // for the others' parts
#pragma unroll
  for (int step = 0; step < HEAD / 16; ++step) {
    ldmatrix_x4(queries[step], &tiles.q[q_offset ^ step * 16]);
    for (uint32_t& pair : queries[step]) pair ^= signs;
  }

  float row_max[2] = {-INFINITY, -INFINITY};  // times scale
  float row_sum[2] = {};                      // of what this thread holds of the row
  float sums[HEAD / 8][4] = {};               // of weighted values
  // What a tile of keys adds. `masked`: some query does not see all of them.
  const auto attend = [&](auto masked, int64_t tile, int stage) {
    constexpr bool MASKED = decltype(masked)::value;
    float scores[TILES_N][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD / 16; ++step) {
#pragma unroll
      for (int n = 0; n < TILES_N; n += 2) {
        uint32_t keys[4];  // of two tiles
        ldmatrix_x4(keys, &tiles.k[stage][(k_offset ^ step * 16) + n * 8 * HEAD]);
        mma_m16n8k16<T>(scores[n], queries[step], {keys[0], keys[1]});
        mma_m16n8k16<T>(scores[n + 1], queries[step], {keys[2], keys[3]});
      }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (MASKED) {
        // Of every 16 x 8 scores a lane holds two neighbours in row lane_id / 4 and two in the eighth row
        // below. Their query sees the keys from_key to to_key of this tile.
        const int row = warp_row + half * 8 + lane_id / 4;
        const int from_key = row + within(first - tile);
        const int to_key = min(row + within(last - tile), int(min(args.Sk - tile, int64_t{BLOCK_N})) - 1);
#pragma unroll
        for (int i = 0; i < TILES_N * 2; ++i) {
          const int key = i / 2 * 8 + lane_id % 4 * 2 + i % 2;
          if (key < from_key || key > to_key) scores[i / 2][half * 2 + i % 2] = -INFINITY;
        }
      }
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < TILES_N * 2; ++i) largest = fmaxf(largest, scores[i / 2][half * 2 + i % 2]);
      const float new_max = fmaxf(row_max[half], row_maximum(largest) * scale);
      // Before the first key that the query sees, -inf - -inf would be NaN. Other tiles always have a key.
      const float origin = MASKED && new_max == -INFINITY ? 0.0f : new_max;
      const float factor = exp2_approx(row_max[half] - origin);
      row_max[half] = new_max;

      row_sum[half] *= factor;
#pragma unroll
      for (int i = 0; i < TILES_N * 2; ++i) {
        float& score = scores[i / 2][half * 2 + i % 2];
        score = exp2_approx(fmaf(score, scale, -origin));  // the key's weight
        row_sum[half] += score;
      }
#pragma unroll
      for (int d = 0; d < HEAD / 8; ++d) {
        sums[d][half * 2] *= factor;
        sums[d][half * 2 + 1] *= factor;
      }
    }

    // The weights of 16 keys: two tiles of scores, as they lie, are the left operand.
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
      uint32_t weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &scores[step * 2 + i / 2][i % 2 * 2];
        weights[i] = rounded_pair<T>(pair[0], pair[1]);
      }
#pragma unroll
      for (int d = 0; d < HEAD / 8; d += 2) {
        uint32_t values[4];  // of two tiles
        ldmatrix_x4_trans(values, &tiles.v[stage][(v_offset ^ d * 8) + step * 16 * HEAD]);
        mma_m16n8k16<T>(sums[d], weights, {values[0], values[1]});
        mma_m16n8k16<T>(sums[d + 1], weights, {values[2], values[3]});
      }
    }
  };

  int stage = 0;
  for (int64_t tile = first_tile; tile < end_key; tile += BLOCK_N) {
    cp_async_wait_group<STAGES - 2>();  // for this thread's part of this tile
    __syncthreads();                    // for the others' parts, and for all reads of the tile before
    copy(stage == 0 ? STAGES - 1 : stage - 1, tile + (STAGES - 1) * BLOCK_N);
    // Whether the last query sees the tile's first key, and the first query the last.
    const bool clean = tile >= first + rows - 1 && tile + BLOCK_N <= min(last + 1, args.Sk);
    clean ? attend(std::false_type{}, tile, stage) : attend(std::true_type{}, tile, stage);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t query = block_row + warp_row + half * 8 + lane_id / 4;
    const float sum = row_total(row_sum[half]);
    if (query >= args.Sq) continue;
    const int64_t row = (batch * args.H + head) * args.Sq + query;
    const bool empty = sum == 0.0f;  // the query sees no key
    const float inverse = 1.0f / sum;
    T* out = static_cast<T*>(args.out) + row * args.D + lane_id % 4 * 2;
#pragma unroll
    for (int d = 0; d < HEAD / 8; ++d) {
      if (d * 8 >= D) break;
      const float* values = &sums[d][half * 2];
      const uint32_t pair = empty ? 0 : rounded_pair<T>(values[0] * inverse, values[1] * inverse);
      if constexpr (WIDE) {
        *reinterpret_cast<uint32_t*>(out + d * 8) = pair;
      } else {
        out[d * 8] = reinterpret_cast<const T*>(&pair)[0];
        out[d * 8 + 1] = reinterpret_cast<const T*>(&pair)[1];
      }
    }
    if (lane_id % 4 == 0) args.lse[row] = empty ? -INFINITY : row_max[half] * LN_2 + logf(sum);
  }
}

void attention_v04_pipelined(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  require_narrow_heads(args.D, 128, "v14_dispatch");
  const unsigned grid = blocks_of(args.B * args.H, args.Sq, cdiv(args.Sq, BLOCK_M));
  const auto aligned = [](const HeadStrides& stride) {
    return stride.batch % PIECE == 0 && stride.head % PIECE == 0 && stride.row % PIECE == 0;
  };
  const bool wide = aligned_to_16_bytes(args.q, args.k, args.v, args.out) && aligned(args.q_stride) &&
                    aligned(args.k_stride) && aligned(args.v_stride);
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = args.D <= 64 ? wide ? attention_v04_pipelined_kernel<T, 64, true>
                                            : attention_v04_pipelined_kernel<T, 64, false>
                        : wide       ? attention_v04_pipelined_kernel<T, 128, true>
                                     : attention_v04_pipelined_kernel<T, 128, false>;
    const int shared = args.D <= 64 ? sizeof(Tiles<T, 64>) : sizeof(Tiles<T, 128>);
    allow_shared_memory(kernel, shared);
    kernel<<<grid, THREADS, shared, args.stream>>>(args);
    CUDA_CHECK(cudaGetLastError());
  };
  args.dtype == Dtype::bf16 ? launch(__nv_bfloat16{}) : launch(__half{});
}
