// Probes of the arithmetic: fp32 FMA and the two generations of bf16 tensor-core instructions. See probes.h
// for what one call does. All operands come from the buffer, because power, and with it the clock, depends on
// the values: fill it with random ones. Over ones every accumulator counts its own multiply-adds.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "probes_common.cuh"

namespace compute_probe {

constexpr int FMA_THREADS = 512;
constexpr int FMA_BLOCKS_PER_SM = 2;
constexpr int FMA_CHAINS = 16;  // independent, so that the latency of one hides behind the others
constexpr int FMA_LENGTH = 32;  // links a chain grows by per turn: 512 FFMA for three instructions of loop
static_assert(FMA_FP32_FLOP_PER_SM == int64_t{FMA_BLOCKS_PER_SM} * FMA_THREADS * FMA_CHAINS * FMA_LENGTH * 2);

// Chains of x <- x * scale + shift in registers. The compiler may not reorder floating-point operations, each
// link needs the one before, and every chain's growth is reported. Values stay bounded for |scale| < 1.
__global__ __launch_bounds__(FMA_THREADS, FMA_BLOCKS_PER_SM) void probe_fma_fp32_kernel(const float4* data,
                                                                                        int64_t turns,
                                                                                        double* results) {
  const float4* mine = data + threadIdx.x;
  float chain[FMA_CHAINS];
#pragma unroll
  for (int i = 0; i < FMA_CHAINS; i += 4) {
    const float4 start = mine[i / 4 * FMA_THREADS];
    chain[i] = start.x, chain[i + 1] = start.y, chain[i + 2] = start.z, chain[i + 3] = start.w;
  }
  const float4 factors = mine[FMA_CHAINS / 4 * FMA_THREADS];
  const float scale = factors.x;
  const float shift = factors.y;

#pragma unroll 1
  for (int64_t turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int link = 0; link < FMA_LENGTH; ++link) {
#pragma unroll
      for (int i = 0; i < FMA_CHAINS; ++i) chain[i] = fmaf(chain[i], scale, shift);
    }
  }

  float growth = 0;
#pragma unroll
  for (int i = 0; i < FMA_CHAINS; i += 4) {
    const float4 start = mine[i / 4 * FMA_THREADS];
    growth += chain[i] - start.x + chain[i + 1] - start.y + chain[i + 2] - start.z + chain[i + 3] - start.w;
  }
  report(results, growth);
}

inline void probe_fma_fp32(const ProbeArgs& args) {
  probe_fma_fp32_kernel<<<FMA_BLOCKS_PER_SM * multiprocessor_count(), FMA_THREADS, 0, args.stream>>>(
      reinterpret_cast<const float4*>(data_of(args).vectors), args.iterations, results_of(args));
  CUDA_CHECK(cudaGetLastError());
}

constexpr int MMA_THREADS = 256;
constexpr int MMA_BLOCKS_PER_SM = 2;
constexpr int MMA_SIDE = 4;    // 4 fragments of A times 4 of B: 16 independent accumulators
constexpr int MMA_REPEAT = 4;  // times per turn
constexpr int64_t MMA_FLOP = 2 * 16 * 8 * 16;
static_assert(MMA_BF16_FLOP_PER_SM ==
              int64_t{MMA_BLOCKS_PER_SM} * (MMA_THREADS / 32) * MMA_SIDE * MMA_SIDE * MMA_REPEAT * MMA_FLOP);

// mma.sync m16n8k16 on operands in registers; volatile, and every accumulator is reported. PTX ISA, "Matrix
// Fragments for mma.m16n8k16 with floating point type". On 9.0 these instructions reach about two thirds of
// the rate that wgmma does.
__global__ __launch_bounds__(MMA_THREADS, MMA_BLOCKS_PER_SM) void probe_mma_bf16_kernel(const uint4* data,
                                                                                        int64_t turns,
                                                                                        double* results) {
  uint4 a[MMA_SIDE];      // eight bf16 each: a lane's part of a 16 x 16 fragment
  uint4 b[MMA_SIDE / 2];  // two 16 x 8 fragments each
  float acc[MMA_SIDE][MMA_SIDE][4] = {};
#pragma unroll
  for (int i = 0; i < MMA_SIDE; ++i) a[i] = data[i * MMA_THREADS + threadIdx.x];
#pragma unroll
  for (int j = 0; j < MMA_SIDE / 2; ++j) b[j] = data[(MMA_SIDE + j) * MMA_THREADS + threadIdx.x];

#pragma unroll 1
  for (int64_t turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int repeat = 0; repeat < MMA_REPEAT; ++repeat) {
#pragma unroll
      for (int i = 0; i < MMA_SIDE; ++i) {
#pragma unroll
        for (int j = 0; j < MMA_SIDE; ++j) {
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
              "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
              : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3])
              : "r"(a[i].x), "r"(a[i].y), "r"(a[i].z), "r"(a[i].w), "r"(j % 2 ? b[j / 2].z : b[j / 2].x),
                "r"(j % 2 ? b[j / 2].w : b[j / 2].y));
        }
      }
    }
  }

  float sum = 0;
#pragma unroll
  for (int i = 0; i < MMA_SIDE; ++i) {
#pragma unroll
    for (int j = 0; j < MMA_SIDE; ++j) sum += acc[i][j][0] + acc[i][j][1] + acc[i][j][2] + acc[i][j][3];
  }
  report(results, sum);
}

inline void probe_mma_bf16(const ProbeArgs& args) {
  probe_mma_bf16_kernel<<<MMA_BLOCKS_PER_SM * multiprocessor_count(), MMA_THREADS, 0, args.stream>>>(
      data_of(args).vectors, args.iterations, results_of(args));
  CUDA_CHECK(cudaGetLastError());
}

constexpr int WGMMA_WARPGROUPS = 2;  // one issues while the other drains
constexpr int WGMMA_THREADS = WGMMA_WARPGROUPS * 128;
constexpr int WGMMA_M = 64, WGMMA_N = 256, WGMMA_K = 16;
constexpr int WGMMA_BLOCK_K = 64;  // 128 bytes of bf16, the width of the swizzle
constexpr int WGMMA_STAGES = 4;    // K blocks in shared memory, so that the operands change
constexpr int WGMMA_A_BYTES = WGMMA_M * WGMMA_BLOCK_K * 2;
constexpr int WGMMA_B_BYTES = WGMMA_N * WGMMA_BLOCK_K * 2;
constexpr int WGMMA_STAGE_BYTES = WGMMA_WARPGROUPS * WGMMA_A_BYTES + WGMMA_B_BYTES;
constexpr int WGMMA_SHARED_BYTES = WGMMA_STAGES * WGMMA_STAGE_BYTES;  // 192 KiB: one block per SM
constexpr int WGMMA_ALIGNMENT = 1024;                                 // of a tile with the 128-byte swizzle
static_assert(WGMMA_A_BYTES % WGMMA_ALIGNMENT == 0 && WGMMA_B_BYTES % WGMMA_ALIGNMENT == 0);
static_assert(WGMMA_SHARED_BYTES <= DATA_MINIMUM);
static_assert(WGMMA_BF16_FLOP_PER_SM ==
              int64_t{2} * WGMMA_WARPGROUPS * WGMMA_STAGES * WGMMA_M * WGMMA_N * WGMMA_BLOCK_K);

// Descriptor of a K-major tile in shared memory with the 128-byte swizzle: rows of 128 bytes, 1024 bytes from
// one group of eight rows to the next. PTX ISA, "Matrix Descriptor Format".
__device__ inline uint64_t swizzled_descriptor(uint32_t address) {
  constexpr uint64_t GROUP_STRIDE = 1024 >> 4;
  constexpr uint64_t SWIZZLE_128_BYTES = 1;
  return (SWIZZLE_128_BYTES << 62) | (GROUP_STRIDE << 32) | (address >> 4);
}

// acc += A * B for one 64 x 256 x 16 step, asynchronously. PTX ISA, "wgmma.mma_async".
__device__ inline void wgmma_m64n256k16(float (&acc)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "
      "}, %128, %129, accumulate, 1, 1, 0, 0; }"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]),
        "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]),
        "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]),
        "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]),
        "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),
        "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]),
        "+f"(acc[38]), "+f"(acc[39]), "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]),
        "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]), "+f"(acc[48]), "+f"(acc[49]),
        "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),
        "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]),
        "+f"(acc[62]), "+f"(acc[63]), "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]),
        "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]), "+f"(acc[72]), "+f"(acc[73]),
        "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79]),
        "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]), "+f"(acc[84]), "+f"(acc[85]),
        "+f"(acc[86]), "+f"(acc[87]), "+f"(acc[88]), "+f"(acc[89]), "+f"(acc[90]), "+f"(acc[91]),
        "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]), "+f"(acc[96]), "+f"(acc[97]),
        "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]),
        "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]),
        "+f"(acc[110]), "+f"(acc[111]), "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]),
        "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]), "+f"(acc[120]), "+f"(acc[121]),
        "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]), "+f"(acc[127])
      : "l"(a), "l"(b));
}

// wgmma m64n256k16 with both operands in shared memory, the layout of a real product (128-byte swizzle), and
// the accumulators in registers; volatile, and every accumulator is reported. One copy of B serves both
// warpgroups.
__global__ __launch_bounds__(WGMMA_THREADS, 1) void probe_wgmma_bf16_kernel(const uint4* data, int64_t turns,
                                                                            double* results) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char unaligned[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(unaligned));
  const uint32_t padding = (WGMMA_ALIGNMENT - start % WGMMA_ALIGNMENT) % WGMMA_ALIGNMENT;
  uint4* tiles = reinterpret_cast<uint4*>(unaligned + padding);
  for (int i = threadIdx.x; i < WGMMA_SHARED_BYTES / 16; i += WGMMA_THREADS) tiles[i] = data[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // show these stores to the tensor cores
  __syncthreads();  // wait until every thread has filled its part of the tiles

  float acc[128] = {};  // a thread's part of 64 x 256
  // The same in all lanes; the shuffle tells the compiler so, and descriptors then live in uniform registers.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const uint64_t first_a = swizzled_descriptor(start + padding + warpgroup * WGMMA_A_BYTES);
  const uint64_t first_b = swizzled_descriptor(start + padding + WGMMA_WARPGROUPS * WGMMA_A_BYTES);
#pragma unroll 1
  for (int64_t turn = 0; turn < turns; ++turn) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");  // the accumulators are ready to be added to
#pragma unroll
    for (int stage = 0; stage < WGMMA_STAGES; ++stage) {
#pragma unroll
      for (int k = 0; k < WGMMA_BLOCK_K; k += WGMMA_K) {
        const int offset = (stage * WGMMA_STAGE_BYTES + k * 2) / 16;  // descriptors count in 16 bytes
        wgmma_m64n256k16(acc, first_a + offset, first_b + offset);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // wait for this turn's sixteen products
  }

  float sum = 0;
#pragma unroll
  for (int i = 0; i < 128; ++i) sum += acc[i];
  report(results, sum);
#endif
}

inline void probe_wgmma_bf16(const ProbeArgs& args) {
  constexpr int DYNAMIC_BYTES = WGMMA_SHARED_BYTES + WGMMA_ALIGNMENT;
  CUDA_CHECK(cudaFuncSetAttribute(probe_wgmma_bf16_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  DYNAMIC_BYTES));
  probe_wgmma_bf16_kernel<<<multiprocessor_count(), WGMMA_THREADS, DYNAMIC_BYTES, args.stream>>>(
      data_of(args).vectors, args.iterations, results_of(args));
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace compute_probe
