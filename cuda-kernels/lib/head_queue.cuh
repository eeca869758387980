// The queue of tiles of heads that persistent blocks draw from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "head_limits.h"
#include "step.h"

constexpr int64_t SECTION_BYTES = 32 << 20;  // of what a section's tiles share: part of L2's 50 MB

// The order of tiles, as persistent blocks take them: sections of heads whose shared operands fit into L2
// together. Where a head's first or last tiles take longest, these come first, one of each head.
struct Queue {
  int tiles;
  int heads;          // over all batches
  int section;        // heads; the last section may have fewer
  int block, blocks;  // a tile's rows, and a head's tiles
  bool last_first;    // a head's last tile takes longest
  unsigned* drawn;    // counts what blocks draw; 0 again when all have ended
};

// A tile: its head, over all batches, or -1 behind the last tile; and its first row.
struct Work {
  int head, row;
};

__device__ inline Work work_of(const Queue& queue, unsigned number) {
  if (number >= static_cast<unsigned>(queue.tiles)) return {-1, 0};
  const int tile = static_cast<int>(number);
  const int at = tile / (queue.section * queue.blocks) * queue.section;
  const int heads = min(queue.section, queue.heads - at);
  const int within = tile - at * queue.blocks;
  const int block = within / heads;
  return {at + within % heads, (queue.last_first ? queue.blocks - 1 - block : block) * queue.block};
}

// For `heads` of `rows` rows, in tiles of `block`. Of these heads `group` share operands of `bytes`.
inline Queue queue_of_heads(const Memory& memory, int64_t heads, int64_t rows, int64_t block, int64_t blocks,
                            int64_t group, int64_t bytes) {
  Queue queue = {};
  queue.tiles = static_cast<int>(blocks_of(heads, rows, blocks));
  queue.heads = static_cast<int>(heads);
  queue.section = static_cast<int>(std::clamp<int64_t>(SECTION_BYTES / std::max<int64_t>(bytes, 1) * group,
                                                       std::min(group, heads), heads));
  queue.block = static_cast<int>(block);
  queue.blocks = static_cast<int>(blocks);
  queue.drawn = static_cast<unsigned*>(memory.zeroed());
  return queue;
}
