# multi.sh LIB:STEP,STEP ... : runs the steps of run.py with each library built by build.sh, each under its own time limit
cd "$(dirname "$0")"; nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
for a in "$@"; do lib=${a%%:*}; echo "=== $lib"; SPIKE=$PWD/$lib.so PYTHONUNBUFFERED=1 timeout ${LIMIT:-90} python3 run.py $(echo ${a#*:} | tr , ' ') 2>&1; done
