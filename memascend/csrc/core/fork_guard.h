// Memory that forked children do not get.
//
// Pages that a device or a ring has pinned for transfers cannot be shared with a child until one of the two writes:
// from Linux 5.12 on fork() copies them at once, so that each forked DataLoader worker would take as much memory again.
// A guarded range is left out of children instead (MADV_DONTFORK); one that touches it ends by SIGSEGV.
#pragma once

#include <cstdint>

namespace memascend {

// Guards the whole pages inside [data, data + bytes) while it lives; pages at the ends that others share are copied as
// ever. Ranges may overlap: a page goes to children again when its last guard has gone. Thread-safe. In a forked child
// an inherited guard does nothing, also when it goes.
class ForkGuard {
 public:
  ForkGuard(void* data, std::int64_t bytes);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Whether this process, a child, did not get some page of [data, data + bytes): whatever is there now is not its
  // parent's, and not the child's to unmap in its parent's name.
  [[nodiscard]] static bool withheld_from_us(const void* data, std::int64_t bytes);

 private:
  std::uint64_t id_ = 0;  // 0: no whole page
};

}  // namespace memascend
