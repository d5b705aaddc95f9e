# Completion of statecli for Bash, printed by `statecli completion bash`.

_statecli() {
    local program=${1:-statecli} kind="" line
    COMPREPLY=()
    {
        # The kind of the answer, and a number that other shells need.
        IFS= read -r kind
        IFS= read -r line
        while IFS= read -r line; do
            COMPREPLY+=("${line%%$'\t'*}")
        done
    } < <(
        "${program/#\~/$HOME}" __complete bash "=${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null
    )
    # Bash 3.2, that of macOS, has no compopt: it then adds a space, and offers files if there is nothing else.
    case $kind in
        words) compopt +o default 2>/dev/null ;;
        stems) compopt -o nospace +o default 2>/dev/null ;;
    esac
}

complete -o default -F _statecli statecli
