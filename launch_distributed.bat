@echo off
rem Start N ranks of a command: launch_distributed.bat 4 python train.py --lr 0.1
rem or of an experiment: launch_distributed.bat 2 --config configs\digits_mlp.yaml
rem one per GPU: launch_distributed.bat --num_gpus 4 --config configs\digits_mlp.yaml (all without a number)
rem on several machines: launch_distributed.bat --num_nodes 2 --node_rank 0 --master_addr HOST ...
rem PYTHON selects the interpreter. All options: launch_distributed.bat --help
setlocal
if not defined PYTHON set "PYTHON=python"
"%PYTHON%" -m cyxtrain launch %*
exit /b %ERRORLEVEL%
