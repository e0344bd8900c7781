class Prompter:
    def __init__(self, name):
        self.with_in = ("Below is an instruction that describes a task, paired with an input.\n\n### Instruction:\n{i}"
                        "\n\n### Input:\n{x}\n\n### Response:\n")
        self.no_in = "Below is an instruction that describes a task.\n\n### Instruction:\n{i}\n\n### Response:\n"

    def generate_prompt(self, instruction, input=None, label=None):
        res = self.with_in.format(i=instruction, x=input) if input else self.no_in.format(i=instruction)
        return res + label if label else res
