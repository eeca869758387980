// Rows held by the whole GPU: the kernel of layer_norm_backward's v07 and rms_norm_backward's v05 for rows
// that no cluster holds. x and dout are read once. Terms: docs/glossary.md.
#pragma once

#include "lib/grid_row.cuh"
#include "norm_backward_split.cuh"

// Packs are laid out on column 0, so that a thread has the same columns in all rows of its group; it keeps
// their sums in shared memory, or in global memory where that has no room: no other thread reads them. sums:
// [SUMS / 4, each] words, null if no gradient needs them.
template <typename T, bool CENTERED>
struct GridNormGradient {
  static constexpr int SIZE = Pack<T>::SIZE, SUMS = CENTERED ? 2 * SIZE : SIZE;  // of a pack
  static constexpr float FILL = 0.0f;
  using Numbers = GradientSums;
  using Packs = ShiftedPacks<T, Skews::DIFFER, 1>;
  using Columns = SplitColumns<T, CENTERED, Skews::DIFFER>;
  static_assert(CHUNK_PACKS<2> == GRID_WORKERS, "a thread has every GRID_WORKERS-th pack of a part");

  const NormBackwardArgs& args;
  int groups, each;
  float4* sums;
  RowNumbers numbers = {};

  __device__ int skew_of_row(int64_t) const { return 0; }
  __device__ RowPart<T> part_of(int rank) const { return {args.N, 0, rank, each}; }
  __device__ static GradientSums merge(GradientSums a, GradientSums b) {
    return {a.product + b.product, a.plain + b.plain};
  }

  __device__ Pack<T> weights_of(const RowPart<T>& part, int first) const {
    if (args.weight) return Packs({args.weight, args.N, part}, part, first, 0)[0];
    Pack<T> ones;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) set(ones, j, from_float<T>(1.0f));
    return ones;
  }

  __device__ void add(GradientSums& mine, const GridPart& of, Pack<T> (&packs)[2][1], int at) const {
    const Pack<T> weights = weights_of(part_of(of.rank), at - of.start);
    const float mean = CENTERED ? args.mean[of.row] : 0.0f, rstd = args.rstd[of.row];
    GradientSums of_pack = {};  // a chain of its own for each pack
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float g = float_of(packs[1][0], j) * float_of(weights, j);
      // Outside of the row g is 0, and the distance need not be.
      const float distance = CENTERED ? float_of(packs[0][0], j) - mean : float_of(packs[0][0], j);
      of_pack.product = fmaf(g, distance * rstd, of_pack.product);
      if (CENTERED) of_pack.plain += g;
    }
    mine = merge(mine, of_pack);
  }

  __device__ void begin_row(const GridPart& part, GradientSums whole) {
    const float N = static_cast<float>(args.N);
    numbers = {CENTERED ? args.mean[part.row] : 0.0f, args.rstd[part.row], whole.product / N,
               whole.plain / N};
  }

  __device__ void write(const GridPart& of, const Pack<T> (&packs)[2][1], int at, int pack) const {
    const RowPart<T> part = part_of(of.rank);
    const int first = at - of.start;
    Columns columns{part, first};
    columns.weights = weights_of(part, first);
    const ReadRow<T> row(args.dadded, of.row, args.M, args.N, args.stride_am, part);
    const Packs added(row, part, first, 0);
    const bool keeps = sums != nullptr && pack < each;
    if (keeps && of.row >= groups) load_sums(columns, pack);  // not in the group's first row
    const Pack<T> dx = columns.add(packs[0][0], packs[1][0], added[0], numbers);
    if (keeps) store_sums(columns, pack);
    store_shifted<32>(static_cast<T*>(args.dx) + of.row * args.N + part.start, part, first, dx);
  }

  // Writes the sums of a part's columns: gradients if the group is the only one, otherwise partial sums.
  __device__ void write_sums(int group, int rank, float* workspace) const {
    if (sums == nullptr) return;
    const RowPart<T> part = part_of(rank);
    for (int pack = threadIdx.x; pack < each; pack += GRID_WORKERS) {
      Columns columns{part, pack * SIZE};
      if (part.count(columns.first) == 0) break;
      load_sums(columns, pack);
      if (groups > 1) {
        columns.write(partial_sums(workspace, 0, groups, args.N, group), columns.dweight);
        if constexpr (CENTERED)
          columns.write(partial_sums(workspace, 1, groups, args.N, group), columns.dbias);
      } else {
        if (args.dweight) columns.write(static_cast<T*>(args.dweight), columns.dweight);
        if constexpr (CENTERED)
          if (args.dbias) columns.write(static_cast<T*>(args.dbias), columns.dbias);
      }
    }
  }

 private:
  // A thread's words lie `each` words apart, so that neighbouring lanes have neighbouring words.
  template <int COUNT>
  __device__ void load(float (&to)[COUNT], const float4* from) const {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const float4 words = from[i * each];
      to[4 * i] = words.x, to[4 * i + 1] = words.y, to[4 * i + 2] = words.z, to[4 * i + 3] = words.w;
    }
  }
  template <int COUNT>
  __device__ void store(float4* to, const float (&from)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i)
      to[i * each] = make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
  }
  __device__ void load_sums(Columns& columns, int pack) const {
    load(columns.dweight, sums + pack);
    if constexpr (CENTERED) load(columns.dbias, sums + SIZE / 4 * each + pack);
  }
  __device__ void store_sums(const Columns& columns, int pack) const {
    store(sums + pack, columns.dweight);
    if constexpr (CENTERED) store(sums + SIZE / 4 * each + pack, columns.dbias);
  }
};

// A kernel's body. `outer_sums`: [blocks, each] of SUMS floats where shared memory has no room for them.
template <typename T, bool CENTERED>
__device__ void backward_of_grid_rows(const NormBackwardArgs& args, const GridShape& shape,
                                      GroupCounts* counts, GradientSums* numbers, float4* outer_sums,
                                      float* workspace) {
  extern __shared__ __align__(128) char slots[];
  const GridInputs<T, 2> inputs{{static_cast<const T*>(args.x), static_cast<const T*>(args.dout)},
                                {args.stride_xm, args.stride_dm}};
  const bool keeps = args.dweight != nullptr || args.dbias != nullptr;
  auto* sums = reinterpret_cast<float4*>(slots + shape.slots * SLOT_BYTES<2>);
  constexpr int WORDS = GridNormGradient<T, CENTERED>::SUMS / 4;
  if (outer_sums) sums = outer_sums + static_cast<int64_t>(blockIdx.x) * shape.each * WORDS;
  GridNormGradient<T, CENTERED> work{args, shape.groups, shape.each, keeps ? sums : nullptr};
  go_through_grid_rows<T, 2>(shape, inputs, counts, numbers, work);
  if (threadIdx.x < GRID_WORKERS)
    work.write_sums(blockIdx.x / shape.blocks, blockIdx.x % shape.blocks, workspace);
}

// Launches kernel(args, shape, counts, numbers, outer_sums, workspace), whose body is backward_of_grid_rows,
// and for several groups add_kernel, which adds their column sums. False for rows that the GPU does not hold,
// and for short ones.
template <typename T, bool CENTERED>
bool launch_grid_rows(const NormBackwardArgs& args,
                      void (*kernel)(NormBackwardArgs, GridShape, GroupCounts*, GradientSums*, float4*,
                                     float*),
                      void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= GRID_ROW) return false;
  constexpr int SUM_BYTES = GridNormGradient<T, CENTERED>::SUMS * sizeof(float);
  int sum_bytes = wants_sums(args) ? SUM_BYTES : 0;
  GridShape shape = grid_shape<T, 2>(args.M, args.N, sum_bytes);
  float4* outer_sums = nullptr;
  if (shape.blocks == 0) {
    shape = grid_shape<T, 2>(args.M, args.N);
    if (shape.blocks == 0) return false;
    const int64_t packs = int64_t{shape.groups} * shape.blocks * shape.each;
    outer_sums = static_cast<float4*>(args.memory->workspace(packs * SUM_BYTES));
    sum_bytes = 0;
  }
  auto* const numbers =
      static_cast<GradientSums*>(args.memory->workspace(args.M * shape.blocks * sizeof(GradientSums)));
  const auto launch = [&](float* workspace) {
    launch_grid<2>(shape, sum_bytes, args.stream, kernel, args, shape,
                   static_cast<GroupCounts*>(args.memory->zeroed()), numbers, outer_sums, workspace);
  };
  if (shape.groups > 1) {
    launch_with_early_sums<T>(args, shape.groups, CENTERED, launch, add_kernel);
  } else {
    launch(nullptr);
  }
  return true;
}
