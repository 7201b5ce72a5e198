#!/bin/bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ gpus }}
#SBATCH --cpus-per-task={{ 8 * gpus }}
#SBATCH --output=%x-%j.log
# sbatch FILE. The network between nodes, where they have several: export NCCL_SOCKET_IFNAME=... GLOO_SOCKET_IFNAME=...
export OMP_NUM_THREADS=8
export MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c {{ line("$SLURM_NODEID", "$MAIN") | quote }}
