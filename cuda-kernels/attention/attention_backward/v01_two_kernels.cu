// attention_backward v01_two_kernels: one kernel for the gradients of keys and values, one for the queries'.
//
// Change:   a block of the first kernel owns 64 keys and walks over the queries that see them, in all heads
//           that share the keys; a block of the second owns 64 queries and walks over keys. Both compute
//           scores anew, with mma.sync. A small kernel before them computes two numbers of each query: lse to
//           base 2, and delta.
// Why:      with the saved lse a weight is one exponential of its score. A gradient is summed in its owner's
//           registers, in one order, and written once. Scores of keys by queries lie in the registers of a
//           result just as the products with dout and q want their left operand.
// Counter:  the tensor cores compute seven products for five: scores and dout @ v^T twice.
// Requires: compute capability 8.0. Fetched 16 bytes at a time where all rows are aligned to them, else by
//           the element.
// Source:   Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2, divided as in Triton's tutorial
//           06-fused-attention.
// Twin:     triton-kernels/attention/attention_backward/v01_two_kernels.py
#include "delta.cuh"
#include "lib/ptx/ampere.cuh"

namespace {

constexpr int WARPS = 4;
constexpr int TILE = WARPS * 16;  // keys, and queries; of a block's own ones a warp takes 16
constexpr int THREADS = WARPS * 32;
constexpr int BLOCKS_PER_SM = 2;
constexpr int TILES_N = TILE / 8;  // tiles of one mma.sync in a warp's scores
constexpr int PIECE = 8;           // elements in 16 bytes

template <typename T, int HEAD>
struct Tiles {
  T q[TILE * HEAD], dout[TILE * HEAD];  // [TILE, HEAD], swizzled
  T k[TILE * HEAD], v[TILE * HEAD];
  float lse2[TILE], delta[TILE];
};

// Where a piece of 16 bytes lies in a tile with rows of HEAD elements. The lower bits of its place in the row
// are XORed with the row, so that 8 neighbours in a column fill all 32 banks just as 8 in a row do.
template <int HEAD>
__device__ inline int swizzled(int row, int piece) {
  static_assert(HEAD == 64 || HEAD == 128, "a row fills all banks, once or twice");
  return row * HEAD + (piece ^ row % 8) * PIECE;
}

// Copies this thread's part of a tile [TILE, HEAD] of a head [rows, D]. What lies past the edges becomes
// zero: a weight of 0 would make NaN of a NaN there.
template <bool WIDE, int HEAD, typename T>
__device__ inline void copy_tile(T* tile, const void* heads, const HeadStrides& stride, int64_t batch,
                                 int64_t head, int64_t first_row, int64_t rows, int D) {
  constexpr int PASS = THREADS / (HEAD / PIECE);  // rows that all threads together fetch a piece each of
  static_assert(PASS % 8 == 0 && TILE % PASS == 0, "passes are swizzled alike, and all threads take part");
  const int row = threadIdx.x / (HEAD / PIECE), piece = threadIdx.x % (HEAD / PIECE);
  const T* from = static_cast<const T*>(heads) + batch * stride.batch + head * stride.head +
                  (first_row + row) * stride.row + piece * PIECE;
  T* to = tile + swizzled<HEAD>(row, piece);
  const int valid_rows = piece * PIECE < D ? int(min(rows - first_row, int64_t{TILE})) - row : 0;
  constexpr int FLIGHT = WIDE ? 4 : 1;  // pieces under way, which need registers beside those of dk and dv
#pragma unroll 1
  for (int pass = 0; pass < TILE; pass += FLIGHT * PASS) {
    Pack<T> pieces[FLIGHT] = {};
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) {
      if (pass + i * PASS < valid_rows) pieces[i] = piece_at<WIDE>(from + (pass + i * PASS) * stride.row);
    }
#pragma unroll
    for (int i = 0; i < FLIGHT; ++i) *reinterpret_cast<Pack<T>*>(to + (pass + i * PASS) * HEAD) = pieces[i];
  }
}

// Two values rounded to T, in one register.
template <typename T>
__device__ inline uint32_t rounded_pair(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}

// Where the row starts whose address a lane gives to ldmatrix, of the first 16 rows and columns of a tile.
// Others differ by whole rows, which are added, or in bits of the piece's place, which are XORed.
template <int HEAD>
__device__ inline int lane_offset() {
  return swizzled<HEAD>(threadIdx.x % 16, threadIdx.x % 32 / 16);
}

// Adds a warp's 16 rows of tile a times the transposed tile b to `products`.
template <int HEAD, typename T>
__device__ inline void multiply(float (&products)[TILES_N][4], const T* a, const T* b) {
  const int offset = lane_offset<HEAD>();
  a += threadIdx.x / 32 * 16 * HEAD;
#pragma unroll
  for (int step = 0; step < HEAD / 16; ++step) {
    uint32_t rows[4];
    ldmatrix_x4(rows, &a[offset ^ step * 16]);
#pragma unroll
    for (int n = 0; n < TILES_N; n += 2) {
      uint32_t columns[4];  // of two tiles
      ldmatrix_x4(columns, &b[(offset ^ step * 16) + n * 8 * HEAD]);
      mma_m16n8k16<T>(products[n], rows, {columns[0], columns[2]});
      mma_m16n8k16<T>(products[n + 1], rows, {columns[1], columns[3]});
    }
  }
}

// Adds `left` [16, TILE], rounded, times tile b to this warp's 16 rows of sums. Two tiles of a product, as
// they lie, are the left operand.
template <int HEAD, typename T>
__device__ inline void add_product(float (&sums)[HEAD / 8][4], const float (&left)[TILES_N][4], const T* b) {
  const int offset = lane_offset<HEAD>();
#pragma unroll
  for (int step = 0; step < TILE / 16; ++step) {
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &left[step * 2 + i / 2][i % 2 * 2];
      rows[i] = rounded_pair<T>(pair[0], pair[1]);
    }
#pragma unroll
    for (int d = 0; d < HEAD / 8; d += 2) {
      uint32_t columns[4];  // of two tiles
      ldmatrix_x4_trans(columns, &b[(offset ^ d * 8) + step * 16 * HEAD]);
      mma_m16n8k16<T>(sums[d], rows, {columns[0], columns[1]});
      mma_m16n8k16<T>(sums[d + 1], rows, {columns[2], columns[3]});
    }
  }
}

// Stores this thread's part of sums * factor, of rows that exist, into a contiguous matrix [rows, D].
template <bool WIDE, int HEAD, typename T>
__device__ inline void store(T* matrix, const float (&sums)[HEAD / 8][4], float factor, int64_t row,
                             int64_t rows, int D) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= rows) break;
    T* out = matrix + (row + half * 8) * D + threadIdx.x % 4 * 2;
#pragma unroll
    for (int d = 0; d < HEAD / 8; ++d) {
      if (d * 8 >= D) break;
      const uint32_t pair = rounded_pair<T>(sums[d][half * 2] * factor, sums[d][half * 2 + 1] * factor);
      if constexpr (WIDE) {
        *reinterpret_cast<uint32_t*>(out + d * 8) = pair;
      } else {
        out[d * 8] = reinterpret_cast<const T*>(&pair)[0];
        out[d * 8 + 1] = reinterpret_cast<const T*>(&pair)[1];
      }
    }
  }
}

// A limit of the band, no further out than makes a difference: sums with it cannot overflow.
__device__ inline int64_t clamped(int64_t limit, const AttentionBackwardArgs& args) {
  return min(max(limit, -args.Sq), args.Sk);
}
// A limit relative to a tile, in 32 bits: what lies further out makes no difference.
__device__ inline int within(int64_t limit) { return min(max(limit, int64_t{-TILE}), int64_t{TILE}); }

// Turns what a warp has of two products, q @ k^T and dout @ v^T, into p and ds. terms_at(half, column) are
// the query's lse2 and delta. Row r sees the columns from r + from to r + to that are below `columns`.
template <typename Terms>
__device__ inline void weigh(float (&p)[TILES_N][4], float (&ds)[TILES_N][4], float factor, int from, int to,
                             int columns, Terms terms_at) {
  // Of every 16 x 8 products a lane holds two neighbours in row lane_id / 4 and two in the eighth row below.
  const int column = threadIdx.x % 4 * 2, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < TILES_N * 4; ++i) {
    const float2 terms = terms_at(i % 4 / 2, column + i / 4 * 8 + i % 2);
    float& weight = p[i / 4][i % 4];
    float& gradient = ds[i / 4][i % 4];
    weight = exp2_approx(fmaf(weight, factor, -terms.x));
    gradient = weight * (gradient - terms.y);
  }
  if (from <= 1 - TILE && to >= TILE - 1 && columns == TILE) return;  // all rows see all columns
#pragma unroll
  for (int i = 0; i < TILES_N * 4; ++i) {
    const int at = column + i / 4 * 8 + i % 2, in_row = row + i % 4 / 2 * 8;
    if (at < in_row + from || at > in_row + to || at >= columns) p[i / 4][i % 4] = ds[i / 4][i % 4] = 0.0f;
  }
}

}  // namespace

// dk and dv. HEAD: 64 or 128, at least D. WIDE: rows can be copied in pieces of 16 bytes, and pairs of
// results stored. The grids are flat, since y and z would end at 65535. A head's blocks are neighbours: those
// that run at the same time read the same tiles, which come from L2.
template <typename T, int HEAD, bool WIDE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_backward_v01_two_kernels_kernel(const AttentionBackwardArgs args, const QueryTerms terms) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& tiles = *reinterpret_cast<Tiles<T, HEAD>*>(memory);
  const int64_t blocks = cdiv(args.Sk, TILE), group = args.H / args.H_KV;
  const int64_t batch = blockIdx.x / blocks / args.H_KV, kv_head = blockIdx.x / blocks % args.H_KV;
  const int64_t block_key = blockIdx.x % blocks * TILE;
  copy_tile<WIDE, HEAD>(tiles.k, args.k, args.k_stride, batch, kv_head, block_key, args.Sk, args.D);
  copy_tile<WIDE, HEAD>(tiles.v, args.v, args.v_stride, batch, kv_head, block_key, args.Sk, args.D);

  // Key `row` of the block is seen by the queries from row + first to row + last.
  const int64_t first = block_key - clamped(args.band.last, args);
  const int64_t last = block_key - clamped(args.band.first, args);
  const int64_t keys = min(args.Sk - block_key, int64_t{TILE});
  const int64_t begin = max(first, int64_t{0}) / TILE * TILE, end = min(last + keys, args.Sq);
  float dk[HEAD / 8][4] = {}, dv[HEAD / 8][4] = {};
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const float* head_terms = (threadIdx.x < TILE ? terms.lse2 : terms.delta) +
                              (batch * args.H + head) * terms.padded + threadIdx.x % TILE;
    for (int64_t tile = begin; tile < end; tile += TILE) {
      copy_tile<WIDE, HEAD>(tiles.q, args.q, args.q_stride, batch, head, tile, args.Sq, args.D);
      copy_tile<WIDE, HEAD>(tiles.dout, args.dout, args.dout_stride, batch, head, tile, args.Sq, args.D);
      (threadIdx.x < TILE ? tiles.lse2 : tiles.delta)[threadIdx.x % TILE] = head_terms[tile];
      __syncthreads();  // for all tiles to be complete

      float p[TILES_N][4] = {}, ds[TILES_N][4] = {};  // transposed
      multiply<HEAD>(p, tiles.k, tiles.q);
      multiply<HEAD>(ds, tiles.v, tiles.dout);
      weigh(p, ds, args.scale * LOG2_E, within(first - tile), within(last - tile), TILE,
            [&](int, int query) { return make_float2(tiles.lse2[query], tiles.delta[query]); });
      add_product<HEAD>(dv, p, tiles.dout);
      add_product<HEAD>(dk, ds, tiles.q);
      __syncthreads();  // for all reads, before the next tiles take the place of these
    }
  }
  const int64_t row = block_key + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int64_t at = (batch * args.H_KV + kv_head) * args.Sk * args.D;
  store<WIDE, HEAD>(static_cast<T*>(args.dk) + at, dk, args.scale, row, args.Sk, args.D);
  store<WIDE, HEAD>(static_cast<T*>(args.dv) + at, dv, 1.0f, row, args.Sk, args.D);
}

// dq.
template <typename T, int HEAD, bool WIDE>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    attention_backward_v01_two_kernels_queries_kernel(const AttentionBackwardArgs args,
                                                      const QueryTerms terms) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& tiles = *reinterpret_cast<Tiles<T, HEAD>*>(memory);
  const int64_t blocks = cdiv(args.Sq, TILE);
  const int64_t batch = blockIdx.x / blocks / args.H, head = blockIdx.x / blocks % args.H;
  const int64_t kv_head = head / (args.H / args.H_KV), block_query = blockIdx.x % blocks * TILE;
  copy_tile<WIDE, HEAD>(tiles.q, args.q, args.q_stride, batch, head, block_query, args.Sq, args.D);
  copy_tile<WIDE, HEAD>(tiles.dout, args.dout, args.dout_stride, batch, head, block_query, args.Sq, args.D);
  const int64_t row = block_query + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float2 row_terms[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = (batch * args.H + head) * terms.padded + row + half * 8;
    row_terms[half] = make_float2(terms.lse2[at], terms.delta[at]);
  }

  // Query `row` of the block sees the keys from row + first to row + last.
  const int64_t first = block_query + clamped(args.band.first, args);
  const int64_t last = block_query + clamped(args.band.last, args);
  const int64_t queries = min(args.Sq - block_query, int64_t{TILE});
  const int64_t begin = max(first, int64_t{0}) / TILE * TILE, end = min(last + queries, args.Sk);
  float dq[HEAD / 8][4] = {};
  for (int64_t tile = begin; tile < end; tile += TILE) {
    copy_tile<WIDE, HEAD>(tiles.k, args.k, args.k_stride, batch, kv_head, tile, args.Sk, args.D);
    copy_tile<WIDE, HEAD>(tiles.v, args.v, args.v_stride, batch, kv_head, tile, args.Sk, args.D);
    __syncthreads();  // for all tiles to be complete

    float p[TILES_N][4] = {}, ds[TILES_N][4] = {};
    multiply<HEAD>(p, tiles.q, tiles.k);
    multiply<HEAD>(ds, tiles.dout, tiles.v);
    weigh(p, ds, args.scale * LOG2_E, within(first - tile), within(last - tile),
          min(args.Sk - tile, int64_t{TILE}), [&](int half, int) { return row_terms[half]; });
    add_product<HEAD>(dq, ds, tiles.k);
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }
  T* out = static_cast<T*>(args.dq) + (batch * args.H + head) * args.Sq * args.D;
  store<WIDE, HEAD>(out, dq, args.scale, row, args.Sq, args.D);
}

template <typename T, int HEAD, bool WIDE>
static void launch(const AttentionBackwardArgs& args) {
  constexpr int BYTES = sizeof(Tiles<T, HEAD>);
  const int64_t heads = args.B * args.H, kv_heads = args.B * args.H_KV;
  QueryTerms terms = {};
  if (heads * args.Sq > 0) terms = query_terms<T>(args, cdiv(args.Sq, TILE) * TILE);
  const auto run = [&](auto* kernel, int64_t all_heads, int64_t S) {
    if (all_heads * S == 0) return;
    allow_shared_memory(kernel, BYTES);
    const unsigned grid = blocks_of(all_heads, S, cdiv(S, TILE));
    kernel<<<grid, THREADS, BYTES, args.stream>>>(args, terms);
    CUDA_CHECK(cudaGetLastError());
  };
  run(attention_backward_v01_two_kernels_kernel<T, HEAD, WIDE>, kv_heads, args.Sk);
  run(attention_backward_v01_two_kernels_queries_kernel<T, HEAD, WIDE>, heads, args.Sq);
}

void attention_backward_v01_two_kernels(const AttentionBackwardArgs& args) {
  require_narrow_heads(args.D, 128, "v10_dispatch");
  const bool wide = rows_are_aligned(args.dout, args.dout_stride) &&
                    rows_are_aligned(args.q, args.q_stride) && rows_are_aligned(args.k, args.k_stride) &&
                    rows_are_aligned(args.v, args.v_stride) && aligned_to_16_bytes(args.dq, args.dk, args.dv);
  const auto launch_for = [&](auto zero) {
    using T = decltype(zero);
    if (args.D <= 64) {
      wide ? launch<T, 64, true>(args) : launch<T, 64, false>(args);
    } else {
      wide ? launch<T, 128, true>(args) : launch<T, 128, false>(args);
    }
  };
  args.dtype == Dtype::bf16 ? launch_for(__nv_bfloat16{}) : launch_for(__half{});
}
