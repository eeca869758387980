// layer_norm v10_one_row: a cluster holds one row, where rows start with lines.
//
// Change:   rows of 12 to 80 KiB that start with lines are one a cluster, 2 or 2.5 KiB of it a warp, in
//           blocks of up to four warps, where v08 has two side by side.
// Why:      two rows were to halve the traffic of weights and biases from L2. By way of L1 little of it is
//           left, while a second row's packs are registers with which more warps would run; and an SM has
//           more bytes under way than memory serves best. Clusters with one row come and go more finely.
//           Trials ran before the predictions.
// Counter:  the time falls to 0.995 of v09's at rows of 12288 and to 0.988 at rows of 16384.
// Requires: as v09, whose other rows are: those of less than 12 KiB, those that start anywhere or have a
//           residual, those for which a cluster would have more than eight blocks, and those for which more
//           than a twelfth of what its threads have room for would be idle.
// Source:   see v08
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v09_rows_per_warp(const LayerNormArgs& args);

namespace {

constexpr int64_t ROW = 12 * 1024;  // bytes of a row from which one is faster than two
constexpr int MOST_BLOCKS = 8;      // of a cluster; for longer rows two are faster
constexpr int THREADS = 128;        // of a block: larger ones are those of clusters of more blocks
constexpr int64_t IDLE_SHARE = 12;  // of the packs that threads have room for, one in so many may be idle
// Blocks at once on an SM, which leaves a thread 64 registers, or 72 for five packs, and has 64 or 70 KiB of
// rows under way. v08's threads have 80 for two rows of five packs, so that it has 120 KiB under way.
template <int PACKS>
constexpr int BLOCKS = PACKS == 4 ? 8 : 7;

template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, BLOCKS<PACKS>)
    layer_norm_v10_one_row_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, true, true, false>(args, blocks, period);
}

template <typename T, int PACKS>
bool launch(const LayerNormArgs& args) {
  return launch_held<T, 1, PACKS, true, true>(args, layer_norm_v10_one_row_kernel<T, PACKS>);
}
template <typename T>
bool launch(const LayerNormArgs& args) {
  constexpr int64_t NONE = INT64_MAX;
  const int64_t packs = args.N / Pack<T>::SIZE;
  if (args.residual || !are_lined<T>(args) || packs * 16 < ROW) return false;
  // Packs that a cluster has room for. What idle lanes could hold nobody asks for, and no second row makes up
  // for it: with an eighth of it idle a row takes longer than one of two side by side.
  const auto room_of = [&](int each) {
    const HeldShape shape(packs, each);
    const int64_t room = int64_t{shape.blocks} * shape.threads * each;
    const bool fits = room >= packs && shape.blocks <= MOST_BLOCKS;
    return fits && IDLE_SHARE * (room - packs) <= room ? room : NONE;
  };
  const int64_t four = room_of(4), five = room_of(5);
  if (four == NONE && five == NONE) return false;
  return four <= five ? launch<T, 4>(args) : launch<T, 5>(args);
}

}  // namespace

void layer_norm_v10_one_row(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v09_rows_per_warp(args);
  });
}
