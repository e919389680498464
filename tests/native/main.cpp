// Runs all tests, or those whose names contain the first argument.
#include "check.h"

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int ran = 0;
  for (const auto& test : check::tests()) {
    if (!check::contains(test.name, filter)) {
      continue;
    }
    const int before = check::failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      check::report(false, "no exception", test.name.c_str(), 0, error.what());
    }
    ++ran;
    if (check::failures() != before) {
      std::cerr << "FAILED " << test.name << '\n';
    }
  }
  std::cout << ran << " native tests, " << check::failures() << " failed checks\n";
  return check::failures() == 0 && ran > 0 ? 0 : 1;
}
