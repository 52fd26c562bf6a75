#!/usr/bin/env bash
# All checks, from a clean clone on a machine with nothing prepared: installs what is missing, builds, then lint, types,
# formats, tests, and the native tests under the address and the thread sanitizer. Runs everything; fails if anything did.
#   tests/run.sh [--long] [PYTEST ARGUMENT...]
# --long runs the tests marked long too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks=(-m "not long")
if [ "${1-}" = --long ]; then
    marks=()
    shift
fi

mount_scripts/setup_env.sh test clang-format doctest-dev fio findmnt
export PATH="$PWD/.venv/bin:$PATH"

results=()
failed=0
check() {
    local name=$1 begin=$SECONDS outcome=ok
    shift
    printf '\n\033[1;36m==>\033[0m %s\n' "$name"
    "$@" || { outcome=FAILED; failed=1; }
    results+=("$(printf '%-6s %4d s  %s' "$outcome" $((SECONDS - begin)) "$name")")
}

native_tests() {
    local sanitizer=$1 folder=build/native-$1
    # Unlike the sanitizers of this compiler's age, some kernels put mappings where a shadow should be: no randomisation.
    cmake -S . -B "$folder" -G Ninja -DCKPTFS_NATIVE_TESTS=ON -DCKPTFS_PYTHON_MODULE=OFF -DCKPTFS_SANITIZE="$sanitizer" >/dev/null &&
        cmake --build "$folder" | tail -n 3 &&
        setarch "$(uname -m)" -R ctest --test-dir "$folder" --output-on-failure
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
mapfile -t native_sources < <(find native -name '*.[ch]pp' | sort)
check "clang-format" clang-format --dry-run -Werror "${native_sources[@]}"
check "pytest" python -m pytest "${marks[@]}" "$@"
check "native tests, address sanitizer" native_tests address
check "native tests, thread sanitizer" native_tests thread

printf '\n'
printf '%s\n' "${results[@]}"
exit $failed
