// Packs of matrices whose rows start at any element, for dispatching steps of dropout_add and of its backward
// pass: a pack is shifted together from the two aligned words of 16 bytes that hold it. Terms:
// docs/glossary.md.
#pragma once

#include "dropout_packs.cuh"

// The two aligned words that hold the SIZE elements from `at` on.
template <typename T>
struct ShiftedPack {
  static constexpr int SIZE = Pack<T>::SIZE;
  int shift = 0;
  Pack<T> low = {}, high = {};

  ShiftedPack() = default;
  // Issues the loads, if they are wanted.
  __device__ ShiftedPack(const T* at, bool wanted) : shift(skew_of(at)) {
    const auto* const words = reinterpret_cast<const uint4*>(at - shift);
    load_if(wanted, words, low.words);
    load_if(wanted && shift > 0, words + 1, high.words);
  }

  // `nothing` is 0, but unknown to the compiler: what it is computed from is computed first (see take_after).
  __device__ Pack<T> together(uint32_t nothing) const {
    return put_together<T>(low.words, high.words, (shift | static_cast<int>(nothing)) & (SIZE - 1));
  }
};

// Whether packs of out may end a row and begin the next one.
enum class Ends { BETWEEN, WITHIN };

// The pack of a matrix that starts at `place`. Where rows END WITHIN packs, the elements from column N on are
// the first ones of the next row.
template <typename T, Ends ENDS>
class CountedPack {
 public:
  static constexpr int SIZE = Pack<T>::SIZE;

  CountedPack() = default;
  // Issues the loads.
  __device__ CountedPack(const T* matrix, int64_t stride, Place place, int64_t N) {
    const T* const at = matrix + place.row * stride + place.col;
    here_ = {at, true};
    if constexpr (ENDS == Ends::WITHIN) {
      left_ = static_cast<int>(min(N - place.col, int64_t{SIZE}));
      next_ = {at + (stride - N), left_ < SIZE};
    }
  }

  // `nothing`: see ShiftedPack.
  __device__ Pack<T> get(uint32_t nothing) const {
    Pack<T> pack = here_.together(nothing);
    if constexpr (ENDS == Ends::WITHIN) {
      const Pack<T> next = next_.together(nothing);
#pragma unroll
      for (int j = 1; j < SIZE; ++j) {
        if (j >= left_) set(pack, j, next[j]);
      }
    }
    return pack;
  }

 private:
  ShiftedPack<T> here_, next_;
  int left_ = SIZE;  // elements of the first row
};

// A pack of the bias, element by element where a row ends in it.
template <Ends ENDS, typename T>
__device__ Pack<T> load_bias(const T* bias, Place place, int64_t N) {
  if (ENDS == Ends::WITHIN && place.col + Pack<T>::SIZE > N)
    return load_elements<T>(bias, 0, {0, place.col}, N, Pack<T>::SIZE);
  return load_factors(bias + place.col, 0, static_cast<int>(min(N - place.col, int64_t{INT_MAX})));
}

// Whether take_shifted_packs serves a matrix. Its rows do not overlap: so no word of a pack reaches beyond
// the matrix, but for those of its first pack and of its last ones.
template <typename T>
bool are_shifted_packs(const PackArgs& args) {
  return args.N >= Pack<T>::SIZE && args.stride_first >= args.N &&
         (args.second == nullptr || args.stride_second >= args.N) && aligned_to_16_bytes(args.out);
}

// PACKS aligned packs of out a thread, a block's width apart, counted through the matrix. Rows have a pack at
// least, so that a pack is of two rows at most. Loads are issued before the seed is read, and waited for
// after words are drawn; but where rows END WITHIN packs, before: the four words of an operand would take too
// many registers. results_of(kept, first, second, bias) returns the pack to store; a missing operand is 0.
template <typename T, Operand SECOND, Operand BIAS, Ends ENDS, int PACKS, int THREADS, typename Results>
__device__ void take_shifted_packs(const PackArgs& args, const PackLayout& layout, Results results_of) {
  constexpr int SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  constexpr bool HAS_SECOND = SECOND == Operand::GIVEN, EARLY = ENDS == Ends::WITHIN;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (PACKS * STEP);
  const uint32_t mine = threadIdx.x * SIZE;
  // Words of the matrix's first and last packs may reach beyond it.
  if (blockIdx.x == 0 || start + PACKS * STEP + SIZE > args.M * args.N) {
#pragma unroll 1
    for (int i = 0; i < PACKS; ++i) take_elements<T>(args, start + mine + i * STEP, results_of);
    return;
  }

  Place places[PACKS] = {place_of(start + mine, args.N)};
#pragma unroll
  for (int i = 1; i < PACKS; ++i) {
    places[i] = place_after(places[i - 1], layout.step_rows, layout.step_cols, args.N);
  }
  const auto issue = [&](const void* matrix, int64_t stride, int i) {
    return CountedPack<T, ENDS>(static_cast<const T*>(matrix), stride, places[i], args.N);
  };
  CountedPack<T, ENDS> first[PACKS], second[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    first[i] = issue(args.first, args.stride_first, i);
    if constexpr (HAS_SECOND) second[i] = issue(args.second, args.stride_second, i);
  }
  Pack<T> taken[PACKS][3] = {};
  const auto take = [&](int i, uint32_t nothing) {
    taken[i][0] = first[i].get(nothing);
    if (HAS_SECOND) taken[i][1] = second[i].get(nothing);
  };
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (EARLY) {
      take(i, 0);
      keep_packed(taken[i][0]), keep_packed(taken[i][1]);
    }
    if (BIAS == Operand::GIVEN)
      taken[i][2] = load_bias<ENDS>(static_cast<const T*>(args.bias), places[i], args.N);
  }

  const Mask mask(args.dropout);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    bool kept[SIZE];
    keeps_from(mask, kept, start, mine + i * STEP);
    if (!EARLY) take(i, kept[SIZE - 1] ? layout.zero : 0);
    __stcs(reinterpret_cast<uint4*>(static_cast<T*>(args.out) + start + mine + i * STEP),
           results_of(kept, taken[i][0], taken[i][1], taken[i][2]).words);
  }
}
