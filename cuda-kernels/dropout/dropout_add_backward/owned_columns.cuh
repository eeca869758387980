// dx and dbias of the columns that a block owns in all rows, for few long rows of any skew. Terms:
// docs/glossary.md.
#pragma once

#include "lib/held.cuh"
#include "shifted_rows.cuh"

// A block has `groups` groups of `lanes` threads, which take the rows of its columns in turn. A kind is the
// set of a group's rows that have the same skew; a group takes one kind after the other. If skews differ, a
// group has a pack more than the block's columns are: where a pack begins in one block's columns and ends in
// the next one's, both blocks load it.
struct OwnedColumns {
  int lanes, groups;
  int width;      // columns of a block
  int step;       // rows from one of a kind to the next one
  int rows;       // of the matrix
  int edge;       // see edge_rows
  uint32_t zero;  // 0, unknown to the compiler: see add_nothing

  int64_t blocks(int64_t N) const { return cdiv(N, width); }
  int threads() const { return lanes * groups; }
  // The most rows that a group takes.
  int64_t turns() const { return cdiv(std::min(rows, step), groups) * cdiv(rows, step); }
};

constexpr int MOST_GROUPS = 8;  // of a block: a warp each
// A block's start and its sums' end take as long as so many rows.
constexpr int64_t ROWS_BESIDE = 2;

// The lanes with the least expected time, if an SM has room for BLOCKS_PER_SM blocks of THREADS threads. Few
// lanes are many blocks of few rows: they come in waves, each of which starts anew.
template <typename T, int THREADS, int BLOCKS_PER_SM>
OwnedColumns owned_columns(const DropoutAddBackwardArgs& args) {
  static_assert(THREADS == 32 * MOST_GROUPS);
  const int rows = static_cast<int>(args.M), period = rows > 1 ? skew_period<T>(args.N) : 1;
  const int64_t room = int64_t{BLOCKS_PER_SM} * THREADS * multiprocessor_count();
  OwnedColumns layout = {.rows = rows, .edge = static_cast<int>(edge_rows<T>(args))}, best = layout;
  int64_t least = INT64_MAX;
  for (int lanes = THREADS; lanes >= 32; lanes /= 2) {
    layout.lanes = lanes, layout.width = (lanes - (period > 1)) * Pack<T>::SIZE;
    // The step is a multiple of the period: groups are a power of two, unless they are as many as rows; then
    // none has a second row.
    layout.groups = std::clamp(rows, 1, THREADS / lanes);
    layout.step = std::max(period, layout.groups);
    const int64_t waves = cdiv(layout.blocks(args.N), room / layout.threads());
    const int64_t time = waves * (layout.turns() + ROWS_BESIDE);
    if (time < least) least = time, best = layout;
  }
  return best;
}

// The most blocks that any of these layouts has.
template <typename T>
int64_t most_owning_blocks(const DropoutAddBackwardArgs& args) {
  const bool skewed = args.M > 1 && skew_period<T>(args.N) > 1;
  return cdiv(args.N, (32 - skewed) * Pack<T>::SIZE);
}

// Walks the rows of a block's first group, kind by kind; those of another group are its number farther down.
// So all threads walk as many, whether their group has a row there or not.
struct KindRow {
  int kind = 0, row = 0;  // behind the last row: row >= rows

  __device__ bool begins_kind() const { return row == kind && kind > 0; }
  __device__ void advance(const OwnedColumns& layout) {
    row += layout.step;
    if (row < layout.rows) return;
    kind += layout.groups;
    row = kind < layout.step ? kind : layout.rows;
  }
};

// A pack whose rows start at multiples of 16 bytes where those of dx do.
template <typename T>
struct AlignedPack {
  Pack<T> pack = {};

  AlignedPack() = default;
  __device__ AlignedPack(const T* at, bool wanted) { load_if(wanted, at, pack.words); }
  __device__ Pack<T> together(uint32_t nothing) const {
    Pack<T> taken = pack;
    add_nothing(taken, nothing);
    return taken;
  }
};

// Packs are aligned in dx, whose first row is aligned; those of dout and x are, too, if their SKEWS are
// ALIKE, and are else shifted together. ROWS rows of a thread are under way.
template <typename T, Activation ACTIVATION, Skews SKEWS, int ROWS, int THREADS>
__device__ void take_owned_columns(const DropoutAddBackwardArgs& args, const OwnedColumns& layout) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool SLOPES = ACTIVATION != Activation::none;
  constexpr Operand BIAS = SLOPES ? Operand::GIVEN : Operand::MISSING;
  using Loaded = std::conditional_t<SKEWS == Skews::ALIKE, AlignedPack<T>, ShiftedPack<T>>;
  __shared__ float totals[(THREADS + MOST_GROUPS) * SIZE];
  const int lane = threadIdx.x % layout.lanes, group = threadIdx.x / layout.lanes;
  // A group's sum of column SIZE * slot + line - SIZE: neighbouring lanes have neighbouring slots, whatever
  // the skew. Slots beside the block's columns are written, but not used.
  const auto total_of = [&](int number, int line, int slot) -> float& {
    return totals[(number * SIZE + line) * (layout.lanes + 1) + slot];
  };
  // Columns are counted from the block's first one.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * layout.width;
  // Fewer than INT_MAX are left, so that a pack that begins before the row still ends within an int.
  const int left = static_cast<int>(min(args.N - first, int64_t{INT_MAX - SIZE}));
  const int width = min(layout.width, left);
  const auto skew_of_row = [&](int row) { return row * static_cast<int>(args.N % SIZE) % SIZE; };
  const auto column_at = [&](int skew) { return lane * SIZE - skew; };
  // Words of the first and the last packs of a row may reach beyond dout or x, but for rows within.
  const bool at_end = (blockIdx.x == 0 && lane < 2) || (lane + 2) * SIZE > left;
  const auto is_readable = [&](int row) {
    return !at_end || (row >= layout.edge && row < layout.rows - layout.edge);
  };
  const auto place_of = [&](const void* matrix, int64_t stride, int row, int column) {
    return static_cast<const T*>(matrix) + (row * stride + first + column);
  };

  KindRow ahead, loaded[ROWS];
  Loaded douts[ROWS], xs[ROWS];
  const auto load = [&](int i) {
    const int row = ahead.row + group, column = column_at(skew_of_row(row));
    const bool wanted = row < layout.rows && column < width && is_readable(row);
    douts[i] = {place_of(args.dout, args.stride_dm, row, column), wanted};
    if constexpr (SLOPES) xs[i] = {place_of(args.x, args.stride_xm, row, column), wanted};
    loaded[i] = ahead;
    ahead.advance(layout);
  };
#pragma unroll
  for (int i = 0; i < ROWS; ++i) load(i);

  const Mask mask(args.dropout);
  int skew = 0, column = 0;  // of the kind
  Pack<T> bias = {};
  const auto begin_kind = [&](int kind) {
    skew = skew_of_row(kind + group), column = column_at(skew);
    if (SLOPES && args.bias) bias = load_factors(static_cast<const T*>(args.bias) + first, column, left);
  };
  begin_kind(0);
  float sums[SIZE] = {};
  bool is_first = true;
  const auto end_kind = [&] {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      float& total = total_of(group, (j - skew) & (SIZE - 1), lane + (j >= skew));
      total = is_first ? sums[j] : total + sums[j];
      sums[j] = 0.0f;
    }
    is_first = false;
    __syncthreads();  // for all sums of this kind: of the next one, other threads have these columns
  };

  while (loaded[0].row < layout.rows) {
    KindRow rows[ROWS];
    Pack<T> taken_douts[ROWS], taken_xs[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) rows[i] = loaded[i];
    const auto take = [&](int i, uint32_t nothing) {
      const int row = rows[i].row + group, from = column_at(skew_of_row(row));
      taken_douts[i] = douts[i].together(nothing);
      if (SLOPES) taken_xs[i] = xs[i].together(nothing);
      if (row < layout.rows && from < width && !is_readable(row)) {
        const int begin = blockIdx.x == 0 ? max(-from, 0) : 0, count = min(left - from, SIZE) - begin;
        const auto load_row = [&](const void* matrix, int64_t stride) {
          return load_ragged(place_of(matrix, stride, row, from + begin), -begin, count, 0.0f);
        };
        taken_douts[i] = load_row(args.dout, args.stride_dm);
        if (SLOPES) taken_xs[i] = load_row(args.x, args.stride_xm);
      }
      load(i);
    };
    // All rows at once: the compiler waits for their loads as for one.
    if (!SLOPES) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) take(i, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (i > 0 && rows[i].row >= layout.rows) break;  // all threads
      if (rows[i].begins_kind()) end_kind(), begin_kind(rows[i].kind);
      const int row = rows[i].row + group;
      const int64_t at = row * args.N + first + column;
      bool kept[SIZE];
      keeps_from(mask, kept, at, 0);
      if (SLOPES) take(i, kept[SIZE - 1] ? layout.zero : 0);
      const Gradients<T, ACTIVATION, BIAS> dx(kept, taken_douts[i], taken_xs[i], bias, args.dropout.scale);
      T* const dx_at = static_cast<T*>(args.dx) + at;
      const bool is_row = row < layout.rows && column < width;
      if (is_row) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sums[j] += dx.of[j];
      }
      // Of two blocks that load a pack, the one in whose columns it begins stores it. At the ends of a row,
      // only some of its elements are the row's.
      const bool is_whole = column >= 0 && column + SIZE <= left;
      store_if(is_row && is_whole, reinterpret_cast<uint4*>(dx_at), dx.rounded());
      if (is_row && !is_whole && (column >= 0 || blockIdx.x == 0)) {
        int behind = max(-column, 0);
        asm volatile("" : "+r"(behind));  // against CSE of eight stores' conditions from row to row
        store_pack(dx_at + behind, -behind, min(left - column, SIZE) - behind, false, dx.rounded());
      }
    }
  }

  end_kind();
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float total = 0.0f;
    for (int number = 0; number < layout.groups; ++number) total += total_of(number, i % SIZE, i / SIZE + 1);
    static_cast<T*>(args.dbias)[first + i] = from_float<T>(total);
  }
}
