// Memory that forked children do not get.
//
// Pages that are pinned for transfers by a device or a ring cannot be shared copy-on-write with a child: from Linux
// 5.12 on, fork() copies them at once, so that each forked DataLoader worker would take the same amount of memory
// again. A guarded range is left out of children instead (MADV_DONTFORK); a child that touches it ends by SIGSEGV.
#pragma once

#include <cstdint>

namespace memascend {

// Guards the whole pages inside [data, data + bytes) during its lifetime; partial pages at the ends are inherited as
// usual. Ranges may overlap: children inherit a page again once its last guard is destroyed. Thread-safe. In a forked
// child an inherited guard does nothing, even when it is destroyed.
class ForkGuard {
 public:
  ForkGuard(void* data, std::int64_t bytes);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Returns whether this process is a forked child that did not inherit some page of [data, data + bytes). Whatever is
  // mapped at these addresses now is not the parent's memory, so the child must not unmap it on the parent's behalf.
  [[nodiscard]] static bool withheld_from_us(const void* data, std::int64_t bytes);

 private:
  std::uint64_t id_ = 0;  // 0: no whole page
};

}  // namespace memascend
