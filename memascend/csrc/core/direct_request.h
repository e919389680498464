// A request of the direct engine while it is in flight, and the blocks that it is divided into.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "direct_engine.h"

namespace memascend {

// The bytes of one command: whole sectors transferred directly from or to memory, or any bytes through a bounce buffer.
struct DirectEngine::Block {
  std::uint32_t member;
  std::int64_t offset;  // on the device
  char* data;
  std::int64_t bytes;
  std::uint32_t order;  // number of the block by position in the tensor; index of its checksum
};

struct DirectEngine::Request {
  std::uint64_t id = 0;
  bool write = false;
  std::string key;
  char* data = nullptr;
  std::int64_t bytes = 0;
  std::int64_t offset = 0;
  int priority = 0;
  std::shared_ptr<void> keep_alive;
  TensorRecord record;
  Reservation reservation;  // for a write to new space
  std::shared_ptr<VolatileTensor> tensor;
  bool summed = false;      // whether checksums of blocks are computed

  std::vector<Block> blocks;
  std::vector<std::uint32_t> checksums;  // by `order`
  std::vector<std::int64_t> lengths;
  int rereads = 0;

  // Guarded by DirectEngine::mutex_.
  std::vector<std::pair<std::size_t, std::size_t>> parts;  // blocks not handed out, one range per worker
  std::int64_t unfinished = 0;                              // units: transfers of blocks, and their checksums
  bool cancelled = false;
  std::optional<RequestFailure> failure;
  std::int64_t submitted_ns = 0;
  std::int64_t started_ns = 0;

  [[nodiscard]] std::int64_t units() const { return summed ? 2 : 1; }  // per block

  // Drops the blocks that have not been handed out. Returns their number of units.
  std::int64_t drop() {
    std::int64_t dropped = 0;
    for (auto& [next, end] : parts) {
      dropped += static_cast<std::int64_t>(end - next);
      next = end;
    }
    return dropped * units();
  }
};

}  // namespace memascend
