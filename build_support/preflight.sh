#!/bin/sh
# Prints the Python to make the environment from; checks what no package index can install. On failure it names
# what was found, what is needed and the command to run.
set -u

probe='
import importlib.util, os, sys, sysconfig
version = ".".join(map(str, sys.version_info[:3]))
if not (3, 11) <= sys.version_info[:2] <= (3, 14):
    print(version + " (not 3.11-3.14)")
elif importlib.util.find_spec("ensurepip") is None:
    print(version + " (no venv module)")
elif not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print(version + " (no headers)")
else:
    print("ok")
'

found=''
chosen=''
python_packages=''
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    # A version manager leaves a name on PATH for versions that it would not run here.
    answer=$("$candidate" -c "$probe" 2>/dev/null) || answer='(does not run)'
    if [ "$answer" = ok ]; then
        chosen=$candidate
        break
    fi
    found="$found
  $candidate: $answer"
    name=${candidate##*/}
    case $answer in
        *'(no '*) python_packages="$name-venv $name-dev" ;;
        *'(not '*) python_packages=${python_packages:-python3.11 python3.11-venv python3.11-dev} ;;
    esac
done

compiler=${CXX:-c++}
packages=''
if [ -z "$chosen" ]; then
    echo "Python 3.11-3.14 with its venv module and headers is needed. Found:${found:-
  none of ${PYTHON:-python3, python3.14, python3.13, python3.12, python3.11}}" >&2
    packages=${python_packages:-python3 python3-venv python3-dev}
fi
if ! command -v "${compiler%% *}" >/dev/null 2>&1; then
    echo "A C++ compiler is needed, $compiler is not on PATH." >&2
    packages="$packages g++"
fi

if [ -n "$packages" ]; then
    if command -v apt-get >/dev/null 2>&1; then
        echo "Run: sudo apt-get install" $packages >&2
    elif command -v dnf >/dev/null 2>&1; then
        echo "Run: sudo dnf install python3 python3-devel gcc-c++" >&2
    else
        echo "Install a Python with headers (python.org, or your distribution) and g++." >&2
    fi
    exit 1
fi
echo "$chosen"
