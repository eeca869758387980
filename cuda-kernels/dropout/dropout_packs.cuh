// A matrix as packs of 16 bytes that are counted through all its rows: what steps of dropout_add and of its
// backward pass share.
#pragma once

#include "dropout.cuh"

// A pack of elements from a place on, `count` of them or as many as a pack has, one by one. Across the end of
// a row it goes on in the next one; a bias has rows that lie 0 apart.
template <typename T>
__device__ Pack<T> load_elements(const void* matrix, int64_t stride, Place place, int64_t N, int count) {
  Pack<T> pack = {};
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j, place = next(place, N)) {
    if (j < count) set(pack, j, static_cast<const T*>(matrix)[place.row * stride + place.col]);
  }
  return pack;
}

template <typename T>
__device__ const uint4* pack_at(const void* matrix, int64_t stride, Place place) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(matrix) + place.row * stride + place.col);
}

// What goes in and comes out, whichever way.
struct PackArgs {
  const void* first;
  const void* second;  // or null
  const void* bias;    // [N]; or null
  void* out;           // [M, N], contiguous; first and second: [M, N], rows contiguous
  int64_t M, N;
  int64_t stride_first, stride_second;  // in elements
  Dropout dropout;
};

// How the packs lie. Where rows lie end to end, a pack's place in first and second is that in the matrix.
struct PackLayout {
  bool wide;        // at multiples of 16 bytes, but for the matrix's last elements; a bias has one at least
  bool end_to_end;  // the rows of first and second, one behind the other
  bool wide_bias;   // packs of the bias lie at multiples of 16 bytes, and none has two rows
  int64_t step_rows, step_cols;  // from one of a thread's packs to the next one
  uint32_t zero;                 // 0, which the compiler does not know: see add_nothing
};

template <typename T, int THREADS>
PackLayout layout_of(const PackArgs& args) {
  constexpr int64_t SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  const bool end_to_end = args.M == 1 || (args.stride_first == args.N &&
                                          (args.second == nullptr || args.stride_second == args.N));
  const bool whole = args.N % SIZE == 0 && args.stride_first % SIZE == 0 &&
                     (args.second == nullptr || args.stride_second % SIZE == 0);
  const bool aligned = aligned_to_16_bytes(args.first, args.second, args.out);
  return {(end_to_end || whole) && aligned && (args.bias == nullptr || args.N >= SIZE),
          end_to_end,
          args.N % SIZE == 0 && aligned_to_16_bytes(args.bias),
          STEP / args.N,
          STEP % args.N,
          0};
}

// A pack's elements. Of a word with two of bf16, the upper one is taken by a mask: left alone, the compiler
// shifts it down and up again.
template <typename T>
struct Values {
  float of[Pack<T>::SIZE];

  __device__ explicit Values(Pack<T> pack) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const uint32_t words[] = {pack.words.x, pack.words.y, pack.words.z, pack.words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of[2 * j] = __uint_as_float(words[j] << 16);
        of[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000);
      }
    } else {
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) of[j] = to_float(pack[j]);
    }
  }
};

// Accesses of 16 bytes that a predicate holds back, where a branch would have the compiler wait before it.
// ONCE: nobody needs the lines again, unless rows lie 0 apart, so that L2 gives them up first.
template <bool ONCE = true, typename T>
__device__ void load_if(bool loaded, const uint4* from, Pack<T>& pack) {
  if constexpr (ONCE) {
    asm volatile(
        "{\n"
        ".reg .pred loaded;\n"
        "setp.ne.b32 loaded, %5, 0;\n"
        "@loaded ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w)
        : "l"(from), "r"(static_cast<int>(loaded)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred loaded;\n"
        "setp.ne.b32 loaded, %5, 0;\n"
        "@loaded ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(pack.words.x), "+r"(pack.words.y), "+r"(pack.words.z), "+r"(pack.words.w)
        : "l"(from), "r"(static_cast<int>(loaded)));
  }
}
template <typename T>
__device__ void store_if(bool stored, uint4* to, Pack<T> pack) {
  asm volatile(
      "{\n"
      ".reg .pred stored;\n"
      "setp.ne.b32 stored, %5, 0;\n"
      "@stored st.global.cs.v4.b32 [%4], {%0, %1, %2, %3};\n"
      "}" ::"r"(pack.words.x),
      "r"(pack.words.y), "r"(pack.words.z), "r"(pack.words.w), "l"(to), "r"(static_cast<int>(stored))
      : "memory");
}

// For what the compiler must not know: `nothing` is 0. A pack of which this is asked is waited for here, and
// not before `nothing` is there.
template <typename T>
__device__ void add_nothing(Pack<T>& pack, uint32_t nothing) {
  pack.words.x |= nothing, pack.words.y |= nothing, pack.words.z |= nothing, pack.words.w |= nothing;
}

// A pack is taken apart when it is known what is kept, no sooner. Left alone, the compiler takes it apart,
// and so waits for memory, before the first word is drawn: of a load that lies before a branch it supposes
// that the answer is there.
template <typename T, int COUNT>
__device__ void take_after(const bool (&kept)[COUNT], uint32_t zero, Pack<T>& pack) {
  add_nothing(pack, kept[COUNT - 1] ? zero : 0);
}

// Packs of a bias of at least as many elements, from columns on, which go on with column 0 behind the last
// one. Single elements of all packs are under way before one is waited for; where a row ends among them,
// which is seldom, a pack is asked for again. Wide loads come last: single elements take the same registers,
// and would wait for them and for all loads before.
template <typename T, int PACKS>
__device__ void load_bias_packs(Pack<T> (&packs)[PACKS], const void* bias, bool wide,
                                const Place (&places)[PACKS], int64_t N, uint32_t zero) {
  constexpr int SIZE = Pack<T>::SIZE;
  const T* elements = static_cast<const T*>(bias);
  if (!wide) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      packs[i] = load_ragged(elements + min(places[i].col, N - SIZE), 0, SIZE, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (places[i].col + SIZE > N) packs[i] = load_elements<T>(bias, 0, {0, places[i].col}, N, SIZE);
      // What is not waited for here, wide loads would wait for, whichever are asked for.
      if (sizeof(T) == 4) add_nothing(packs[i], zero);
    }
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    load_if<false>(wide, reinterpret_cast<const uint4*>(elements + places[i].col), packs[i]);
  }
}

// A pack of each thread, by accesses of one element each. results_of(kept, first, second, bias) makes the
// pack that is stored; what is not there is -0, to which everything can be added.
template <typename T, int THREADS, typename Results>
__device__ void take_single_elements(const PackArgs& args, Results results_of) {
  constexpr int SIZE = Pack<T>::SIZE;
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * SIZE;
  const int64_t left = args.M * args.N - at;
  if (left <= 0) return;
  const int count = left < SIZE ? static_cast<int>(left) : SIZE;
  const Place place = place_of(at, args.N);
  const Pack<T> first = load_elements<T>(args.first, args.stride_first, place, args.N, count);
  Pack<T> second, bias;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(second, j, from_float<T>(-0.0f));
  bias = second;
  if (args.second) second = load_elements<T>(args.second, args.stride_second, place, args.N, count);
  if (args.bias) bias = load_elements<T>(args.bias, 0, place, args.N, count);
  bool kept[SIZE];
  mask.keeps(kept, at);
  store_pack(static_cast<T*>(args.out) + at, 0, count, false, results_of(kept, first, second, bias));
}

__device__ inline Place place_after(Place place, int64_t rows, int64_t cols, int64_t N) {
  place = {place.row + rows, place.col + cols};
  return place.col < N ? place : Place{place.row + 1, place.col - N};
}

// PACKS packs of a thread, each a block's width from the last one, of a matrix whose packs are wide. All
// loads are under way before the seed is looked for. SECOND and BIAS say whether there are any: a branch
// between the words and their use would have the compiler keep what they decided in a register each.
template <typename T, bool SECOND, bool BIAS, int PACKS, int THREADS, typename Results>
__device__ void take_packs(const PackArgs& args, const PackLayout& layout, Results results_of) {
  constexpr int SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (PACKS * STEP);
  const auto left = static_cast<uint32_t>(min(args.M * args.N - start, int64_t{PACKS * STEP}));
  const uint32_t mine = threadIdx.x * SIZE;
  const auto is_mine = [&](uint32_t i) { return threadIdx.x + i * THREADS < left / SIZE; };

  Pack<T> first[PACKS] = {}, second[PACKS] = {}, bias[PACKS] = {};
  const auto load = [&](int i, Place place) {
    load_if(is_mine(i), pack_at<T>(args.first, args.stride_first, place), first[i]);
    if (SECOND) load_if(is_mine(i), pack_at<T>(args.second, args.stride_second, place), second[i]);
  };
  if (layout.end_to_end) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) load(i, {0, start + mine + i * STEP});
  }
  if (BIAS || !layout.end_to_end) {
    Place places[PACKS] = {place_of(start + mine, args.N)};
#pragma unroll
    for (int i = 1; i < PACKS; ++i) {
      places[i] = place_after(places[i - 1], layout.step_rows, layout.step_cols, args.N);
    }
    if (!layout.end_to_end) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) load(i, places[i]);
    }
    // Behind all others: a bias has branches, and single elements are waited for.
    if (BIAS) load_bias_packs(bias, args.bias, layout.wide_bias, places, args.N, layout.zero);
  }

  const Mask mask(args.dropout);
  auto* out = reinterpret_cast<uint4*>(static_cast<T*>(args.out) + start);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    bool kept[SIZE];
    mask.keeps(kept, start, mine + i * STEP);
    take_after(kept, layout.zero, first[i]);
    if (SECOND) take_after(kept, layout.zero, second[i]);
    if (BIAS) take_after(kept, layout.zero, bias[i]);
    const Pack<T> results = results_of(kept, first[i], second[i], bias[i]);
    store_if(is_mine(i), out + (threadIdx.x + i * THREADS), results);
  }
  mask.note(args.dropout.used);
  // The matrix's last elements, fewer than a pack, are a thread's each.
  if (threadIdx.x < left % SIZE) {
    const int64_t at = start + left / SIZE * SIZE + threadIdx.x;
    const Place place = place_of(at, args.N);
    const auto element = [&](const void* matrix, int64_t stride) {
      Pack<T> pack = {};
      if (matrix) set(pack, 0, static_cast<const T*>(matrix)[place.row * stride + place.col]);
      return pack;
    };
    bool kept[SIZE] = {mask.keeps(at)};
    static_cast<T*>(args.out)[at] =
        results_of(kept, element(args.first, args.stride_first), element(args.second, args.stride_second),
                   element(args.bias, 0))[0];
  }
}
