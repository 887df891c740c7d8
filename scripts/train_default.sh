#!/usr/bin/env bash
# Trains what ships one round further, on one CUDA GPU: scripts/train_default.sh PART MINUTES
#
#   network   the data-consistency network, from the one that ships
#   no-lpips  its variant without LPIPS, from the one in models/
#   i2sb-sr4, i2sb-jpeg10   the bridge networks of i2sb and cddb, from nothing
#
# DATA names the archives of photographs, RUNS a folder for the results (runs), DDC the command (ddc), SEED the draws (0;
# give each round another). Every 36th picture is kept for validation. The exported model is in the folder RUNS/PART.
set -euo pipefail
part=$1 minutes=$2
repository=$(cd "$(dirname "$0")/.." && pwd)
models=${MODELS:-$repository/src/ddc/models/default} variant=${VARIANT:-$repository/models/no-lpips}
ddc=${DDC:-ddc} out=${RUNS:-runs}/$part
common="--data $DATA --out $out --holdout 36 --batch-size 128 --compile --schedule decay --total-minutes $minutes
  --minutes $minutes --shard-mb 15 --no-checkpoints --pictures-every 0 --log-every 100 --export-every-minutes 1
  --seed ${SEED:-0}"
wide="--noiseless-share 0.4 --wide-tasks jpeg5-95,gauss0.5-4,disc1-6:weight=0.5,motion5-25:weight=0.5,sr2-8,inpaint30-95,box32-128,strokes,denoise"

case $part in
network)
  $ddc train ddc $common $wide --prior "$models/prior" --init "$models/network" --learning-rate 3e-4 --warmup 100 \
    --ema 0.999 --decay-share 0.7 --w-lpips 0.2 \
    --wide-sigma-max 0.15 --trajectory-share 0.75 --trajectory-steps 5 5 5 5 2 2 3 3 10 \
    --tasks sr4,sr8,gauss:lpips=0.15,inpaint92:weight=3:lpips=0.45,jpeg10:lpips=0.25,denoise:weight=0.5 ;;
no-lpips)
  $ddc train ddc $common $wide --prior "$models/prior" --init "$variant/network" --learning-rate 3e-4 --warmup 100 \
    --ema 0.999 --decay-share 0.7 --w-lpips 0 --w-features 0.006 --wide-share 0.3 --trajectory-share 0.75 \
    --trajectory-steps 5 5 5 5 5 5 2 3 10 \
    --tasks sr4:weight=1.5,sr8:weight=1.5,gauss:weight=1.2,inpaint92:weight=2,jpeg10,denoise:weight=0.5 ;;
i2sb-*)
  $ddc train i2sb $common --task "${part#i2sb-}" --crop 128 --learning-rate 6e-4 --warmup 200 --ema 0.999 \
    --decay-share 0.5 --validation-limit 50 ;;
*)
  sed -n '2,9p' "$0" >&2
  exit 2 ;;
esac
