// A tile of queries of a batch, or of sequences of different lengths, as v14's blocks draw it.
#pragma once

#include "lib/packed_sequences.h"
#include "queue.cuh"

// What v14 serves beyond a Problem.
struct AnyProblem : Problem {
  HeadStrides out_stride;
  float cap;  // with a softcap, turns scores into its tanh's arguments; 0 without one
  bool from_end;
  PackedSequences queries, keys;  // without sequences their starts are null
};

// A tile: its head and batch, its first row within its sequence, and that sequence. `head` is -1 behind the
// last tile.
struct Task {
  int head, batch, row;
  int first_q, first_k;  // tokens before the sequence
  int Sq, Sk;
  int first, last;  // query i sees the keys from i + first to i + last
};

__device__ inline Task task_of(const AnyProblem& problem, const Queue& queue, unsigned number) {
  Task task = {-1, 0, 0, 0, 0, problem.Sq, problem.Sk, problem.first, problem.last};
  if (problem.queries.starts == nullptr) {
    const Work work = work_of(queue, number);
    if (work.head < 0) return task;
    task.head = work.head % problem.heads;
    task.batch = work.head / problem.heads;
    task.row = work.row;
  } else {
    if (number >= static_cast<unsigned>(queue.tiles)) return task;
    const int in_order = static_cast<int>(number) / problem.heads;  // all heads of a slot behind each other
    const int slot = queue.last_first ? queue.blocks - 1 - in_order : in_order;
    const int n = problem.queries.sequence_of(slot, queue.block);
    task.head = static_cast<int>(number) % problem.heads;
    task.row = (slot - problem.queries.first_slot(n, queue.block)) * queue.block;
    task.first_q = problem.queries.starts[n];
    task.first_k = problem.keys.starts[n];
    task.Sq = problem.queries.starts[n + 1] - task.first_q;
    task.Sk = problem.keys.starts[n + 1] - task.first_k;
  }
  const int shift = problem.from_end ? task.Sk - task.Sq : 0;
  task.first = min(max(task.first + shift, -task.Sq), task.Sk);
  task.last = min(max(task.last + shift, -task.Sq), task.Sk);
  return task;
}
