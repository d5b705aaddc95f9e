from statecli.cli import main

main()
