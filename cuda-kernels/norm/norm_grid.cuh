// Rows held by the whole GPU: the kernel of layer_norm's v12 and rms_norm's v07 for few rows that no cluster
// holds, and for all longer ones. Terms: docs/glossary.md.
#pragma once

#include "lib/grid_row.cuh"
#include "norm_split.cuh"

// Packs are laid out on the lines of out. A residual is held beside x, and added anew for the result.
template <typename T, bool CENTERED, Residual RESIDUAL>
struct GridNorm {
  static constexpr int TENSORS = RESIDUAL == Residual::ADDED ? 2 : 1;
  static constexpr int SIZE = Pack<T>::SIZE, PACKS = CHUNK_PACKS<TENSORS> / GRID_WORKERS;
  static constexpr int STEP = GRID_WORKERS * SIZE;
  static constexpr float FILL = 0.0f;
  using Numbers = Moments;

  const NormArgs& args;
  int each;
  float mean = 0.0f, rstd = 0.0f;

  __device__ int skew_of_row(int64_t row) const {
    return skew_of<LINE_BYTES>(static_cast<const T*>(args.out) + row * args.N);
  }
  __device__ RowPart<T> part_of(const GridPart& part) const {
    return {args.N, skew_of_row(part.row), part.rank, each};
  }
  __device__ static Moments merge(Moments a, Moments b) {
    return CENTERED && a.count == 0.0f ? b : ::merge<CENTERED>(a, b);
  }

  // The pack to normalise.
  __device__ static Pack<T> input(const Pack<T> (&packs)[TENSORS][PACKS], int i) {
    if constexpr (RESIDUAL == Residual::ADDED) return packs[0][i] + packs[1][i];
    return packs[0][i];
  }

  __device__ void add(Moments& mine, const GridPart& of, Pack<T> (&packs)[TENSORS][PACKS], int at) const {
    const RowPart<T> part = part_of(of);
    const int first = at - of.start;
    Pack<T> inputs[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      inputs[i] = input(packs, i);
      if constexpr (RESIDUAL == Residual::ADDED) {
        T* const added = static_cast<T*>(args.added) + of.row * args.N;
        store_part<Reuse::NONE>(added + part.start, part, first + i * STEP, inputs[i]);
      }
    }
    mine = merge(mine, moments_of<CENTERED>(inputs, part, first, STEP));
  }

  __device__ void begin_row(const GridPart& part, Moments whole) {
    mean = CENTERED ? whole.mean : 0.0f;
    rstd = rstd_of(whole.squares, args.N, args.eps);
    if (part.rank > 0 || threadIdx.x > 0) return;
    if (CENTERED) args.mean[part.row] = mean;
    args.rstd[part.row] = rstd;
  }

  __device__ void write(const GridPart& of, const Pack<T> (&packs)[TENSORS][PACKS], int at, int) const {
    using Factors = ShiftedPacks<T, Skews::DIFFER, PACKS>;
    const RowPart<T> part = part_of(of);
    const NormRow<T> row(args, of.row);
    const int first = at - of.start;
    // All loads are issued before the first result needs one.
    const Factors weights({args.weight, args.N, part}, part, first, STEP);
    const Factors biases({CENTERED ? args.bias : nullptr, args.N, part}, part, first, STEP);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T> results = normalised<CENTERED>(
          row, input(packs, i), mean, rstd, [&] { return weights[i]; }, [&] { return biases[i]; });
      store_part<Reuse::NONE>(row.out + part.start, part, first + i * STEP, results);
    }
  }
};

// A kernel's body.
template <typename T, bool CENTERED, Residual RESIDUAL>
__device__ void normalise_grid_rows(const NormArgs& args, const GridShape& shape, GroupCounts* counts,
                                    Moments* numbers) {
  using Work = GridNorm<T, CENTERED, RESIDUAL>;
  GridInputs<T, Work::TENSORS> inputs{{static_cast<const T*>(args.x)}, {args.stride_xm}};
  if constexpr (RESIDUAL == Residual::ADDED) {
    inputs.rows[1] = static_cast<const T*>(args.residual);
    inputs.strides[1] = args.stride_rm;
  }
  Work work{args, shape.each};
  go_through_grid_rows<T, Work::TENSORS>(shape, inputs, counts, numbers, work);
}

// Launches kernel(args, shape, counts, numbers), whose body is normalise_grid_rows. False if the GPU does not
// hold a row, or if `added` has another skew than out.
template <typename T, Residual RESIDUAL>
bool launch_grid_rows(const NormArgs& args, void (*kernel)(NormArgs, GridShape, GroupCounts*, Moments*)) {
  constexpr int TENSORS = RESIDUAL == Residual::ADDED ? 2 : 1;
  if (args.added && !skewed_alike<T>(args.added, args.N, args.out, args.N)) return false;
  const GridShape shape = grid_shape<T, TENSORS>(args.M, args.N);
  if (shape.blocks == 0) return false;
  auto* const numbers =
      static_cast<Moments*>(args.memory->workspace(args.M * shape.blocks * sizeof(Moments)));
  launch_grid<TENSORS>(shape, 0, args.stream, kernel, args, shape,
                       static_cast<GroupCounts*>(args.memory->zeroed()), numbers);
  return true;
}
