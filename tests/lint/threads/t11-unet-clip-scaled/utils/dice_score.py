def dice_coeff(input, target, epsilon=1e-6):
    dims = (-1, -2)
    inter = 2 * (input * target).sum(dim=dims)
    sets_sum = input.sum(dim=dims) + target.sum(dim=dims)
    sets_sum = sets_sum.where(sets_sum != 0, inter)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def multiclass_dice(input, target):
    return dice_coeff(input.flatten(0, 1), target.flatten(0, 1))


def dice_loss(input, target):
    return 1 - multiclass_dice(input, target)
