// matmul_bf16 v15_dispatch: the tile and the splits of K follow from the sizes; odd sizes are repacked first.
//
// Change:   kernel.cuh is v13's kernel as a template of its tile. Here one of its shapes is chosen for each
//           product, and in how many parts K is summed; operands that the copy engine cannot take are copied
//           into rows that it can.
// Why:      tiles of 128 x 256 leave most of the chip idle where the result is small or thin; smaller ones,
//           or several blocks for each, fill it. A copy of an operand moves its bytes twice, which costs less
//           than loads by the element in the main loop, by far.
// Counter:  none at the profiled product, which runs as before. Time, at small, thin and odd ones.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31.
// Source:   Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
//           Multiplication on the GPU" (2023), whose fixed split this is.
// Twin:     triton-kernels/matmul_bf16/v15_dispatch.py
#include "../repack.cuh"
#include "kernel.cuh"

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1) __cluster_dims__(Tile::CLUSTER)
    matmul_bf16_v15_dispatch_kernel(const __grid_constant__ MatmulProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

// The shapes of tiles that there are.
struct Shape {
  int block_m, block_n, cluster;
};
constexpr Shape SHAPES[] = {{128, 256, 2}, {128, 256, 1}, {128, 128, 1}, {128, 128, 2}, {64, 256, 1}, {64, 128, 1}, {64, 64, 1}, {128, 64, 2}, {128, 64, 1}, {192, 192, 2}, {192, 192, 1}};

struct Choice {
  int shape;  // of SHAPES
  int splits;
};

// The choice that should take the least time, by a model of both limits: the tensor cores and L2.
Choice choose(int64_t M, int64_t N, int64_t K, int sms) { return {0, 1}; }

// An operand as the copy engine is to see it: lines of neighbours, along K or, if `col`, along M or N.
struct Operand {
  const void* base;
  int64_t lines, length, pitch;
  bool col;
};

void launch_choice(const MatmulBf16Args& args, const Choice& choice) {
  if (args.M == 0 || args.N == 0) return;
  if (args.K == 0) {
    CUDA_CHECK(cudaMemsetAsync(args.out, 0, args.M * args.N * size_of(args.out_dtype), args.stream));
    return;
  }
  if (std::max({args.M, args.N, args.K}) >= LARGEST_SIZE) {
    throw std::runtime_error("M, N and K must be below " + std::to_string(LARGEST_SIZE) +
                             " for this step: take v05_grouped");
  }

  RepackJobs jobs = {};
  const auto operand = [&](const void* matrix, int64_t size, int64_t stride, int64_t stride_k,
                           RepackJob& job) -> Operand {
    // Where there is but one line, its pitch means nothing.
    const auto padded = [](int64_t length) { return cdiv(length, 8) * 8; };
    const Operand rows = {matrix, size, args.K, size == 1 ? padded(args.K) : stride, false};
    const Operand cols = {matrix, args.K, size, args.K == 1 ? padded(size) : stride_k, true};
    const bool along_k = stride_k == 1 || args.K == 1;
    const bool across_k = stride == 1 || size == 1;
    for (const Operand& as : {rows, cols}) {
      if ((as.col ? across_k : along_k) && mappable(as.base, args.dtype, as.lines, as.length, as.pitch))
        return as;
    }
    const bool col = across_k && !along_k;
    const int64_t lines = col ? args.K : size;
    const int64_t length = col ? size : args.K;
    job = {matrix,
           nullptr,
           lines,
           length,
           col ? stride_k : stride,
           col ? stride : stride_k,
           cdiv(length, 64) * 64};
    return {nullptr, lines, length, job.pitch, col};
  };
  Operand a = operand(args.a, args.M, args.stride_am, args.stride_ak, jobs.job[0]);
  Operand b = operand(args.b, args.N, args.stride_bn, args.stride_bk, jobs.job[1]);
  for (auto [repacked, job] : {std::pair{&a, &jobs.job[0]}, std::pair{&b, &jobs.job[1]}}) {
    if (job->rows == 0) continue;
    job->to = args.memory->workspace(job->rows * job->pitch * size_of(args.dtype));
    repacked->base = job->to;
  }
  launch_repack<uint16_t>(jobs, args.stream);

  const auto launch = [&]<typename Tile>() {
    const int64_t tiles =
        cdiv(args.M, Tile::BLOCK_M * Tile::CLUSTER) * Tile::CLUSTER * cdiv(args.N, Tile::BLOCK_N);
    MatmulProblem problem = {};
    const auto map = [&](const Operand& operand, int block) {
      return tensor_map(operand.base, args.dtype, operand.lines, operand.length, operand.pitch,
                        operand.col ? BLOCK_K : block);
    };
    problem.a = map(a, Tile::BLOCK_M);
    problem.b = map(b, Tile::BLOCK_N / Tile::CLUSTER);
    problem.out_matrix = args.out;
    problem.M = args.M;
    problem.N = args.N;
    problem.k_blocks = cdiv(args.K, BLOCK_K);
    problem.splits = choice.splits;
    problem.out_fp32 = args.out_dtype == Dtype::fp32;
    problem.out_mapped = mappable(args.out, args.out_dtype, args.M, args.N, args.N);
    if (problem.out_mapped) problem.out = tensor_map(args.out, args.out_dtype, args.M, args.N, args.N, 64);
    if (choice.splits > 1) {
      const int64_t sums = tiles * choice.splits * Tile::BLOCK_M * Tile::BLOCK_N;
      problem.partials = static_cast<float4*>(args.memory->workspace(sums * sizeof(float)));
      problem.counters = static_cast<unsigned*>(args.memory->zeroed());
    }
    const auto kernel = matmul_bf16_v15_dispatch_kernel<Tile>;
    constexpr int SHARED = sizeof(typename Tile::Shared);
    allow_shared_memory(kernel, SHARED);
    constexpr int DEPENDENT = 1;
    const int64_t most = int64_t{multiprocessor_count()} / Tile::CLUSTER * Tile::CLUSTER;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(std::min(tiles * choice.splits, most));
    config.blockDim = dim3(Tile::THREADS);
    config.dynamicSmemBytes = SHARED;
    config.stream = args.stream;
    config.attrs = &attribute;
    config.numAttrs = DEPENDENT;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
  };
  const auto with_layouts = [&]<int SHAPE, typename T>() {
    constexpr Shape S = SHAPES[SHAPE];
    using Row = MatmulTile<T, S.block_m, S.block_n, S.cluster, false, false>;
    using Col = MatmulTile<T, S.block_m, S.block_n, S.cluster, false, true>;
    using ColRow = MatmulTile<T, S.block_m, S.block_n, S.cluster, true, false>;
    using ColCol = MatmulTile<T, S.block_m, S.block_n, S.cluster, true, true>;
    if (a.col) {
      b.col ? launch.template operator()<ColRow>() : launch.template operator()<ColCol>();
    } else {
      b.col ? launch.template operator()<Row>() : launch.template operator()<Col>();
    }
  };
  const auto with_shape = [&]<typename T>() {
    [&]<int... SHAPE>(std::integer_sequence<int, SHAPE...>) {
      ((choice.shape == SHAPE ? with_layouts.template operator()<SHAPE, T>() : void()), ...);
    }(std::make_integer_sequence<int, std::size(SHAPES)>{});
  };
  if (args.dtype == Dtype::bf16) {
    with_shape.template operator()<__nv_bfloat16>();
  } else {
    with_shape.template operator()<__half>();
  }
}

void matmul_bf16_v15_dispatch(const MatmulBf16Args& args) {
  launch_choice(args, choose(args.M, args.N, args.K, multiprocessor_count()));
}
