@echo off
rem Starts N ranks of a command on this machine: launch_distributed.bat 4 python train.py --lr 0.1
rem PYTHON chooses the interpreter of the launcher itself. Everything else: launch_distributed.bat --help
setlocal
if not defined PYTHON set "PYTHON=python"
"%PYTHON%" -m cyxtrain.launch %*
exit /b %ERRORLEVEL%
