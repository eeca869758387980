// Register-resident split rows of a cluster: a kernel of layer_norm's v12 and rms_norm's v07. Terms:
// docs/glossary.md.
#pragma once

#include "norm_held.cuh"

// When a misaligned row's packs of weights and biases are shifted together: at their use, or while the row
// travels.
enum class Factors { AT_USE, EARLY };

// A warp's weights or biases, realigned in place ahead of their use: each pack is rewritten with the row's
// skew, so that write() neither shifts nor loads twice. In place is safe, because a new pack is made of two
// old packs at its own index or higher ones. So the old pack that it replaces serves only new packs of the
// same 32, which all lanes have read before the store, and earlier ones, which are done.
template <typename T, int PACKS>
class LaidFactors {
 public:
  // All lanes call it, after all lanes' copies have arrived.
  __device__ LaidFactors(const HeldFactors<T, PACKS, Alignment::ELEMENT>& factors,
                         const HeldPart<T, PACKS>& part, int single)
      : packs_(factors.packs), at_single_(single != part.NONE ? factors.at(part, single) : 0.0f) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T> laid = factors(part, i);
      __syncwarp();  // for all lanes to have read what these 32 packs replace
      packs_[32 * i + part.lane_id] = laid.words;
    }
  }

  __device__ Pack<T> operator()(const HeldPart<T, PACKS>& part, int i) const {
    return {packs_[32 * i + part.lane_id]};
  }
  // The value for this lane's single element, whose column was given to the constructor.
  __device__ float at(const HeldPart<T, PACKS>&, int) const { return at_single_; }

 private:
  uint4* packs_;
  float at_single_;
};

// Loads x or the residual. Where skews DIFFER, the part's reach must cover this input's.
template <Skews SKEWS, typename T, int PACKS>
__device__ void load_input(Pack<T> (&packs)[PACKS], const T* row, const HeldPart<T, PACKS>& part) {
  if constexpr (SKEWS == Skews::ALIKE) {
    load_held(packs, row, part, 0.0f);
  } else {
    const T* const first = row + part.first_of(0);
    load_shifted<32 * Pack<T>::SIZE>(packs, first, skew_of(first), 0.0f,
                                     [&](int i) { return part.holds(i); });
  }
}

// Loads ROWS rows of x, of which `first` is the first one: it is loaded again in place of rows beyond the
// matrix. A function of its own, because the compiler takes fewer registers then.
template <Skews SKEWS, typename T, int ROWS, int PACKS>
__device__ void load_rows(HeldParts<T, ROWS, PACKS>& rows, const T* first, int64_t stride,
                          const HeldPart<T, PACKS>& part, int single) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const T* const row = first + (rows.is_row(r) ? r * rows.period : 0) * stride;
    load_input<SKEWS>(rows.packs[r], row, part);
    rows.raw[r] = single != part.NONE ? row[single] : from_float<T>(0.0f);
  }
}

// Adds the residual to a register-resident row, rounds the sum to T, and stores it to `added`.
template <Skews SKEWS, typename T, int PACKS>
__device__ void add_residual(Pack<T> (&held)[PACKS], T& raw, const T* residual, T* added,
                             const HeldPart<T, PACKS>& part, int single) {
  constexpr int SIZE = Pack<T>::SIZE;
  Pack<T> more[PACKS];
  load_input<SKEWS>(more, residual, part);
  if (single != part.NONE) {
    raw = from_float<T>(to_float(raw) + to_float(residual[single]));
    added[single] = raw;
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float values[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = float_of(held[i], j) + float_of(more[i], j);
    round_to(held[i], values);
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(added + part.first_of(i)), held[i].words);
  }
}

// A cluster of `blocks` blocks takes ROWS rows at once, of which a thread holds PACKS packs each. Every warp
// sends the statistics of its parts to all blocks, and waits for those of the others; weights and biases
// travel to shared memory meanwhile.
// - A residual takes the registers of a second row, so ROWS is 1.
// - FACTORS says when weights and biases are realigned if rows may start at any ELEMENT.
// - SKEWS: where they DIFFER, packs are laid out on the lines of out, see HeldPart, and ALIGNMENT is that of
//   all but x and the residual. Rows of whole packs are laid out from out's first element on, so that weights
//   and biases need no realignment.
template <typename T, int ROWS, int PACKS, Norm NORM, Alignment ALIGNMENT, Residual RESIDUAL,
          Factors FACTORS = Factors::AT_USE, Skews SKEWS = Skews::ALIKE>
__device__ void normalise_held(const NormArgs& args, int blocks, int period) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER, WHOLE = ALIGNMENT != Alignment::ELEMENT;
  extern __shared__ __align__(128) char memory[];
  __shared__ WarpExchange<MeanSquares, ROWS> exchange;

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32, parts = blocks * warps, own = blockIdx.y * warps + warp_id;
  HeldParts<T, ROWS, PACKS> rows(args, blockIdx.x, period);
  if (rows.first_index >= args.M) return;  // the same for all blocks of a cluster
  const T* const x = static_cast<const T*>(args.x) + rows.first_index * args.stride_xm;
  const T* const residual = static_cast<const T*>(args.residual) + rows.first_index * args.stride_rm;
  const T* const lined = SKEWS == Skews::ALIKE ? x : static_cast<T*>(args.out) + rows.first_index * N;
  HeldPart<T, PACKS> part{N, WHOLE ? 0 : skew_of<LINE_BYTES>(lined), own, lane_id};
  if (SKEWS == Skews::DIFFER) {
    part.reach = reach_of<T>(skew_of(x + part.first_of(0)));
    if (RESIDUAL == Residual::ADDED)
      part.reach = max(part.reach, reach_of<T>(skew_of(residual + part.first_of(0))));
  }
  HeldFactors<T, PACKS, ALIGNMENT> weights(memory, warp_id, static_cast<const T*>(args.weight));
  HeldFactors<T, PACKS, ALIGNMENT> biases(memory, warps + warp_id,
                                          CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  weights.template load<32>(part, lane_id, 1.0f);
  if (CENTERED) biases.template load<32>(part, lane_id, 0.0f);
  cp_async_commit_group();
  const int single = WHOLE && SKEWS == Skews::ALIKE ? part.NONE : part.single();
  load_rows<SKEWS>(rows, x, args.stride_xm, part, single);
  weights.store_rest(part, lane_id);
  if (CENTERED) biases.store_rest(part, lane_id);
  exchange.begin(parts);
  if constexpr (RESIDUAL == Residual::ADDED) {
    static_assert(ROWS == 1);
    add_residual<SKEWS>(rows.packs[0], rows.raw[0], residual,
                        static_cast<T*>(args.added) + rows.first_index * N, part, single);
  }

  const auto find_numbers = [&] {
    MeanSquares mine[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      mine[r] = statistics_of<NORM>(rows.packs[r], part, single != part.NONE, to_float(rows.raw[r]));
    if (FACTORS == Factors::AT_USE) exchange.meet();
    exchange.swap(mine, own, blocks);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const MeanSquares whole =
          merged_parts<NORM>(part, parts, [&](int other) { return exchange.at(other, r); });
      rows.means[r] = whole.mean;
      rows.rstds[r] = rstd_of(whole.squares, N, args.eps);
      if (own == 0 && lane_id == 0 && rows.is_row(r)) {
        if (CENTERED) args.mean[rows.first_index + r * period] = rows.means[r];
        args.rstd[rows.first_index + r * period] = rows.rstds[r];
      }
    }
  };
  const auto wait_for_factors = [] {
    cp_async_wait_group<0>();  // for this lane's copies
    __syncwarp();              // for other lanes' copies
  };
  T* const out = static_cast<T*>(args.out);
  if constexpr (FACTORS == Factors::EARLY) {
    static_assert(CENTERED && !WHOLE);  // there are biases, and something to realign
    wait_for_factors();                 // L1 or L2 brings them before memory brings the rows
    const LaidFactors<T, PACKS> laid_weights(weights, part, single), laid_biases(biases, part, single);
    // The cluster's barrier stands here to keep the compiler's schedule: no sum, which waits for the rows,
    // moves above it, and the realignment is complete below it.
    exchange.meet();
    find_numbers();
    rows.template write<NORM>(out, part, single, laid_weights, laid_biases);
  } else {
    find_numbers();
    wait_for_factors();
    rows.template write<NORM>(out, part, single, weights, biases);
  }
#endif
}

// Whether what is laid out or stored with packs of out allows it.
template <typename T>
bool fits_out(const NormArgs& args) {
  return (!args.added || skewed_alike<T>(args.added, args.N, args.out, args.N)) &&
         aligned_to_16_bytes(args.weight, args.bias);
}

// Launches kernel(args, blocks, period), whose body is normalise_held, in blocks of at most WARPS warps.
// False if the GPU has no room for the cluster, if a row is too long for one, or if skews DIFFER more than
// the kernel allows: then `added` must have out's, and weights and biases start at multiples of 16 bytes.
template <typename T, int ROWS, int PACKS, Norm NORM, Alignment ALIGNMENT, int WARPS = HELD_WARPS,
          Skews SKEWS = Skews::ALIKE, typename Kernel>
bool launch_held(const NormArgs& args, Kernel* kernel) {
  constexpr int WARP_BYTES = HeldFactors<T, PACKS, ALIGNMENT>::COUNT * 16 * (NORM == Norm::LAYER ? 2 : 1);
  constexpr bool ALIKE = SKEWS == Skews::ALIKE;
  static_assert(ALIKE || ROWS == 1);
  if (!ALIKE && !fits_out<T>(args)) return false;
  if constexpr (WARPS * WARP_BYTES + EXCHANGE_BYTES<MeanSquares, ROWS> > 48 * 1024)
    allow_shared_memory(kernel, WARPS * WARP_BYTES);
  const int64_t packs = ALIGNMENT != Alignment::ELEMENT ? args.N / Pack<T>::SIZE
                        : ALIKE ? most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm)
                                : most_packs<T, LINE_BYTES>(args.out, args.N, args.N);
  const HeldShape shape(packs, PACKS, WARPS);
  const int period = ROWS > 1 ? skew_period<T, LINE_BYTES>(args.stride_xm) : 1;
  return launch_by_rows(cdiv(args.M, int64_t{ROWS} * period) * period, shape, shape.threads / 32 * WARP_BYTES,
                        args.stream, kernel, args, shape.blocks, period);
}

// Packs that the threads of a row's cluster have room for, if each holds up to `each` of them.
inline int64_t held_room(int64_t packs, int each) {
  const HeldShape shape(packs, each);
  return int64_t{shape.blocks} * shape.threads * each;
}

constexpr int ONE_ROW_BLOCKS = 8;  // most of a cluster with one row; for longer rows two rows are faster
constexpr int64_t IDLE_SHARE = 12, NO_ROOM = INT64_MAX;

// Packs that a cluster has room for if it has one row, of which a thread holds `each` packs: NO_ROOM if one
// in IDLE_SHARE of them would be idle. An idle lane loads nothing, and no second row makes up for it.
inline int64_t room_of_one_row(int64_t packs, int each) {
  const int64_t room = held_room(packs, each);
  const bool fits = room >= packs && HeldShape(packs, each).blocks <= ONE_ROW_BLOCKS;
  return fits && IDLE_SHARE * (room - packs) <= room ? room : NO_ROOM;
}
