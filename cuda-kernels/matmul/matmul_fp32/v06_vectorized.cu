// matmul_fp32 v06_vectorized: 16 bytes an access, to global and to shared memory.
//
// Change:   a thread fetches 4 neighbours of a and 4 of b at once, and reads its fragments 4 elements at a
//           time. For that a_tile is transposed, and the rows and columns of a thread come in groups of 4
//           neighbours.
// Why:      the same bytes with a quarter of the loads: v05 issues an instruction that is no FMA for every
//           two that are, and each takes the place of one.
// Counter:  instructions fall; load_requests fall to a quarter; sectors_per_store rises to 16.
// Requires: a, b of any strides, out row-major. Unless the rows of all three are contiguous, aligned and
//           whole multiples of 16 bytes, every element is fetched and stored by itself.
// Twin:     none, Triton's compiler picks the width of each access by itself.
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 8;
constexpr int BLOCKS_PER_SM = 2;  // at least: while one waits, the other multiplies
// floats behind each row of a_tile: of 16 rows transposed by a warp, both halves lie 16 banks apart
constexpr int PAD = 4;

constexpr int THREADS_M = BLOCK_M / THREAD_M;
constexpr int THREADS_N = BLOCK_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;

static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % THREAD_N == 0, "threads tile the block");
static_assert(THREADS <= 1024, "a block has 1024 threads at most");
static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0 && PAD % 4 == 0,
              "fragments are read 16 bytes at a time");
static_assert(4 * THREADS == BLOCK_M * BLOCK_K && 4 * THREADS == BLOCK_K * BLOCK_N,
              "each thread fetches 4 elements of either tile");

// With VECTOR, the rows of a, b and out begin at multiples of 16 bytes, and K and N are multiples of 4.
template <bool VECTOR>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_fp32_v06_vectorized_kernel(MatmulFp32Args args) {
  __shared__ alignas(16) float a_tile[BLOCK_K][BLOCK_M + PAD];  // transposed
  __shared__ alignas(16) float b_tile[BLOCK_K][BLOCK_N];

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t block_row = blockIdx.x / blocks_n * BLOCK_M;
  const int64_t block_col = blockIdx.x % blocks_n * BLOCK_N;

  // Of the tiles, this thread fetches these elements and the 3 to their right. It computes 4 x 4 elements
  // from this one on, and those at distances of 4 * THREADS_M rows and 4 * THREADS_N columns.
  const int a_row = threadIdx.x / (BLOCK_K / 4);
  const int a_k = threadIdx.x % (BLOCK_K / 4) * 4;
  const int b_k = threadIdx.x / (BLOCK_N / 4);
  const int b_col = threadIdx.x % (BLOCK_N / 4) * 4;
  const int row = threadIdx.x / THREADS_N * 4;
  const int col = threadIdx.x % THREADS_N * 4;

  // 4 elements from `first` on, `stride` apart, of which the first `count` exist. The others become zeros:
  // they add nothing, and every thread stays for the barriers.
  const auto fetch = [](const float* first, int64_t stride, int64_t count) {
    if constexpr (VECTOR) return count > 0 ? *reinterpret_cast<const float4*>(first) : float4{};
    return float4{count > 0 ? first[0] : 0.0f, count > 1 ? first[stride] : 0.0f,
                  count > 2 ? first[2 * stride] : 0.0f, count > 3 ? first[3 * stride] : 0.0f};
  };

  const float* a = args.a + (block_row + a_row) * args.stride_am;  // [K]
  const float* b = args.b + (block_col + b_col) * args.stride_bn;  // [K, 4]
  const int64_t a_count = block_row + a_row < args.M ? args.K - a_k : 0;
  const int64_t b_count = args.N - (block_col + b_col);
  alignas(16) float sums[THREAD_M][THREAD_N] = {};
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    const float4 a_vector = fetch(a + (k_begin + a_k) * args.stride_ak, args.stride_ak, a_count - k_begin);
    const float4 b_vector =
        fetch(b + (k_begin + b_k) * args.stride_bk, args.stride_bn, k_begin + b_k < args.K ? b_count : 0);
    a_tile[a_k][a_row] = a_vector.x;
    a_tile[a_k + 1][a_row] = a_vector.y;
    a_tile[a_k + 2][a_row] = a_vector.z;
    a_tile[a_k + 3][a_row] = a_vector.w;
    *reinterpret_cast<float4*>(&b_tile[b_k][b_col]) = b_vector;
    __syncthreads();  // for both tiles to be complete
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      alignas(16) float a_fragment[THREAD_M];
      alignas(16) float b_fragment[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; i += 4) {
        *reinterpret_cast<float4*>(&a_fragment[i]) =
            *reinterpret_cast<const float4*>(&a_tile[k][row + i * THREADS_M]);
      }
#pragma unroll
      for (int j = 0; j < THREAD_N; j += 4) {
        *reinterpret_cast<float4*>(&b_fragment[j]) =
            *reinterpret_cast<const float4*>(&b_tile[k][col + j * THREADS_N]);
      }
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sums[i][j] += a_fragment[i] * b_fragment[j];
      }
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int64_t out_row = block_row + row + i / 4 * 4 * THREADS_M + i % 4;
    if (out_row >= args.M) continue;
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) {
      const int64_t out_col = block_col + col + j * THREADS_N;
      float* out = args.out + out_row * args.N + out_col;
      if constexpr (VECTOR) {
        if (out_col < args.N) *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(&sums[i][j]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (out_col + e < args.N) out[e] = sums[i][j + e];
        }
      }
    }
  }
}

void matmul_fp32_v06_vectorized(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const bool vector = args.stride_ak == 1 && args.stride_am % 4 == 0 && args.K % 4 == 0 &&
                      args.stride_bn == 1 && args.stride_bk % 4 == 0 && args.N % 4 == 0 &&
                      aligned_to_16_bytes(args.a, args.b, args.out);
  const auto kernel =
      vector ? matmul_fp32_v06_vectorized_kernel<true> : matmul_fp32_v06_vectorized_kernel<false>;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  kernel<<<grid, THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
