// The queue of tiles of queries that persistent blocks draw from.
#pragma once

#include "problem.h"

constexpr int64_t SECTION_BYTES = 32 << 20;  // of keys and values: part of L2's 50 MB

// The order of tiles, as persistent blocks take them: sections of heads whose keys and values fit into L2
// together. Where a head's first or last tiles see the most keys, these come first, one of each head.
struct Queue {
  int tiles;
  int heads;              // over all batches
  int section;            // heads; the last section may have fewer
  int block_m, blocks_m;  // a tile's queries, and a head's tiles
  bool last_first;        // a head's last tile sees the most keys
  unsigned* drawn;        // counts up to `tiles`, then is 0 again
};

// A tile: its head, over all batches, or -1 behind the last tile; and its first row.
struct Work {
  int head, row;
};

__device__ inline Work work_of(const Queue& queue, unsigned number) {
  if (number >= static_cast<unsigned>(queue.tiles)) return {-1, 0};
  const int tile = static_cast<int>(number);
  const int at = tile / (queue.section * queue.blocks_m) * queue.section;
  const int heads = min(queue.section, queue.heads - at);
  const int within = tile - at * queue.blocks_m;
  const int block_m = within / heads;
  return {at + within % heads, (queue.last_first ? queue.blocks_m - 1 - block_m : block_m) * queue.block_m};
}

// How many keys a query sees.
inline int64_t keys_of(const Problem& problem, int64_t row) {
  const int64_t low = std::max<int64_t>(row + problem.first, 0);
  return std::max<int64_t>(std::min<int64_t>(row + problem.last, problem.Sk - 1) - low + 1, 0);
}

inline Queue queue_of(const AttentionArgs& args, const Problem& problem, int block_m) {
  const int64_t bytes =
      std::max<int64_t>(args.Sk * args.D * 2 * size_of(args.dtype), 1);  // of a head's keys and values
  Queue queue = {};
  queue.tiles = static_cast<int>(blocks_of(args.B * args.H, args.Sq, problem.blocks_m));
  queue.heads = queue.tiles / problem.blocks_m;
  queue.section = static_cast<int>(
      std::clamp<int64_t>(SECTION_BYTES / bytes * problem.group, problem.group, queue.heads));
  queue.last_first = keys_of(problem, problem.Sq - 1) > keys_of(problem, 0);
  queue.block_m = block_m;
  queue.blocks_m = problem.blocks_m;
  queue.drawn = static_cast<unsigned*>(args.memory->zeroed());
  return queue;
}
