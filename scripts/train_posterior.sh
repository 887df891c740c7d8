#!/usr/bin/env bash
# Trains a posterior network on one CUDA GPU, in rounds: scripts/train_posterior.sh PART MINUTES
#
#   mean       the denoiser, from the network without LPIPS in models/, which is grown
#   generator  the generator beside it, from the round before (INIT, or RUNS/mean/posterior)
#
# DATA names the archives of photographs, RUNS a folder for the results (runs), DDC the command (ddc), SEED the draws (0;
# give each round another), CACHE a file for compiled kernels. Every 36th picture is kept for validation. The network is in
# RUNS/PART/posterior.
set -euo pipefail
part=$1 minutes=$2
repository=$(cd "$(dirname "$0")/.." && pwd)
ddc=${DDC:-ddc} runs=${RUNS:-runs} out=${RUNS:-runs}/$part
common="--data $DATA --out $out --holdout 36 --compile --compile-cache ${CACHE:-$runs/kernels} --schedule decay
  --total-minutes $minutes --minutes $minutes --shard-mb 15 --no-checkpoints --pictures-every 0 --log-every 100
  --export-every-minutes 1 --seed ${SEED:-0} --learning-rate 3e-4 --warmup 100 --ema 0.999 --decay-share 0.7 --together 8"
paper="--tasks sr4:weight=1.5,sr8:weight=1.5,gauss,inpaint92:weight=2,jpeg10,denoise --noiseless-share 0.4"
# other strengths and operators, and photographs: a blur or a reduction, then a camera's noise, JPEG, other programs
wide="--wide-share 0.5 --wide-sigma-max 0.12 --wide-tasks jpeg5-95,gauss0.5-4:photo=0.4:blind=0.2,disc1-6:photo=0.5:blind=0.2,\
motion5-25:photo=0.5:blind=0.1,sr2-8:photo=0.5,inpaint30-95,box32-128:weight=2,strokes,denoise:weight=2:photo=0.7:blind=0.4:soft=0.4"

case $part in
mean)
  $ddc train posterior $common $paper $wide --batch-size 96 --init "${INIT:-$repository/models/no-lpips/network}" ;;
generator)
  # two samples of a quarter of the pictures and a sharp estimate of half, so that means and these are batches of one size, which
  # is compiled once; CRITIC continues with the critic of the round before
  $ddc train posterior $common $paper $wide --batch-size 96 --generator-share 0.75 --sharp-share 0.66667 --temperature 0.6 \
    --generator 0.5 --generator-wide 1 --mean-share 0.8 --w-adversary 0.7 ${CRITIC:+--critic "$CRITIC"} --init "${INIT:-$runs/mean/posterior}" ;;
*)
  sed -n '2,10p' "$0" >&2
  exit 2 ;;
esac
