#compdef statecli
# Completion of statecli for Zsh, printed by `statecli completion zsh`.

_statecli() {
    local line
    local -a answer values texts options
    answer=("${(@f)$(${(Q)words[1]} __complete zsh "=$PREFIX" "${(@)words[2,CURRENT-1]}" 2>/dev/null)}")
    if [[ $answer[1] != (words|stems) ]]; then
        compset -p ${answer[2]:-0}
        _files
        return
    fi
    for line in "${(@)answer[3,-1]}"; do
        values+=("${line%%$'\t'*}")
        texts+=("${line%%$'\t'*}${${line#*$'\t'}:+  -- ${line#*$'\t'}}")
    done
    [[ $answer[1] == stems ]] && options=(-S '')
    compadd -l "${(@)options}" -d texts -a values
}

if [[ $funcstack[1] == _statecli ]]; then
    _statecli "$@"
else
    compdef _statecli statecli
fi
