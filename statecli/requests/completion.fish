# Completion of statecli for Fish, printed by `statecli completion fish`.

function __statecli_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l answer ($words[1] __complete fish "=$current" $words[2..-1] 2>/dev/null)
    if contains -- "$answer[1]" words stems
        string join \n -- $answer[3..-1]
    else
        set -l start (math 1 + 0$answer[2])
        set -l flag (string sub -l (math 0$answer[2]) -- $current)
        for path in (__fish_complete_path (string sub -s $start -- $current))
            echo "$flag$path"
        end
    end
end

complete -c statecli -f -a '(__statecli_complete)'
